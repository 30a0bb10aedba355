"""Transformers models layer by layer: the same as their own forward, and blends of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra: pip install 'hypercache-llm[transformers]'")
transformers = pytest.importorskip("transformers", reason="transformers is an extra")

from hypercache.blend import POLICIES, Blend, Blended, Reused, run  # noqa: E402
from hypercache.cli.local_server import local_server  # noqa: E402
from hypercache.client import connect_sync  # noqa: E402
from hypercache.engines import parity  # noqa: E402
from hypercache.engines.cached import generate, prefill  # noqa: E402
from hypercache.engines.layered import LayeredTransformer  # noqa: E402
from hypercache.engines.transformers import TransformersEngine  # noqa: E402
from hypercache.errors import SpecError  # noqa: E402
from hypercache.keys import TenantKey  # noqa: E402
from hypercache.kv import KVBuffers  # noqa: E402
from hypercache.stitch import put  # noqa: E402

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama as SmolLM2": (
        "LlamaConfig",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "llama, yarn, biases": (
        "LlamaConfig",
        {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3, wide heads": ("Qwen3Config", {"head_dim": 32}),
    "mistral, windows": ("MistralConfig", {"sliding_window": 70}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 70, "sliding_window_pattern": 2}),
}
EXACT, SPANS = 10, (Reused(10, 150), Reused(150, 290))
IDS = np.random.default_rng(3).integers(0, 160, 300)


def build(config: str, fields: dict[str, Any], dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**SMALL | {"initializer_range": 0.15} | fields), dtype=dtype
    )
    with torch.no_grad():  # gains of 1 and biases of 0 would hide that one was left out
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> LayeredTransformer:
    return LayeredTransformer(build("LlamaConfig", {}))


def floats(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).view(torch.bfloat16).float().numpy() if array.dtype == np.uint16 else array


def cold(engine: LayeredTransformer) -> tuple[Any, KVBuffers]:
    """Final hidden states by the model's own forward, and its K/V."""
    kv = KVBuffers.allocate(engine.spec, len(IDS))
    with torch.inference_mode():
        out = engine.model(
            input_ids=torch.from_numpy(IDS)[None],
            cache=engine.engine.inject(kv, 0),
            output_hidden_states=True,
        )
    return out, kv


def fetched(engine: LayeredTransformer) -> KVBuffers:
    """The spans of IDS computed in the other order, taken to their places; poison in what is missing."""
    first, second = (IDS[span.start : span.stop] for span in SPANS)
    there = np.concatenate([IDS[:EXACT], second, first])
    stored, kv = KVBuffers.allocate(engine.spec, len(there)), KVBuffers.allocate(engine.spec, len(IDS))
    engine.run(there, stored, 0)
    for layer in range(engine.shape.layers):
        for part in kv.layer(layer):
            part.view(np.uint8)[:] = 0xFF  # NaN in every dtype
    for to, source, count in ((0, 0, 10), (10, 150, 140), (150, 10, 140)):
        put(stored, source, kv, to, count)
    return kv


def blend(engine: LayeredTransformer, settings: Blend) -> tuple[Blended, KVBuffers]:
    kv = fetched(engine)
    return run(engine, IDS, kv, EXACT, SPANS, settings), kv


def relative(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_ratio_1_is_the_models_own_prefill(shape: tuple[str, dict[str, Any]], dtype: str) -> None:
    engine = LayeredTransformer(build(*shape, getattr(torch, dtype)))
    want, full = cold(engine)
    got, kv = blend(engine, Blend(1.0))
    bound = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3}[dtype]
    assert relative(got.hidden, want.hidden_states[-1][0, 290:].float().numpy()) < bound
    assert relative(got.logits, want.logits[0, -1].float().numpy()) < bound
    for layer in range(4):
        for ours, theirs in zip(kv.layer(layer), full.layer(layer), strict=True):
            assert relative(floats(ours), floats(theirs)) < bound
    assert kv.exact == len(IDS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ratio_0_takes_what_was_fetched_bit_for_bit_and_runs_as_the_engine_does(dtype: str) -> None:
    engine = LayeredTransformer(build("LlamaConfig", {}, getattr(torch, dtype)))
    got, kv = blend(engine, Blend(0.0))
    rotated = fetched(engine)
    for layer in range(4):
        for ours, theirs in zip(kv.layer(layer), rotated.layer(layer), strict=True):
            assert ours[:, :290].tobytes() == theirs[:, :290].tobytes()
    want = engine.run(IDS[290:], rotated, 290)
    assert relative(got.logits, want) < (1e-5 if dtype == "float32" else 5e-2)
    assert got.report.flops_reused == 0 and kv.exact == EXACT


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_its_budget_and_repairs(llama: LayeredTransformer, policy: str) -> None:
    want, full = cold(llama)
    hidden = want.hidden_states[-1][0, 290:].numpy()
    rotated = relative(blend(llama, Blend(0.0))[0].hidden, hidden)
    got, kv = blend(llama, Blend(0.3, policy, narrow=0.0))
    report = got.report
    assert report.recomputed == 84 and report.policy == policy
    assert report.by_layer == ((280 if POLICIES[policy].probes else 84), 84, 84, 0)
    assert relative(got.hidden, hidden) < rotated
    untouched = np.setdiff1d(np.arange(290), report.chosen)
    before = fetched(llama)
    for ours, theirs in zip(kv.layer(3), before.layer(3), strict=True):
        np.testing.assert_array_equal(ours[:, untouched], theirs[:, untouched])
    if POLICIES[policy].probes:
        for ours, theirs in zip(kv.layer(1), full.layer(1), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("shape", ["qwen3, wide heads", "gemma3"])
def test_what_policies_see_is_what_the_models_own_attention_says(shape: str) -> None:
    config, fields = SHAPES[shape]
    model = build(config, {**fields, "attn_implementation": "eager"})
    engine = LayeredTransformer(model)
    with torch.inference_mode():
        own = model(input_ids=torch.from_numpy(IDS)[None], output_attentions=True).attentions
    seen: list[Any] = []

    class Watching:
        name, probes, mass_layers = "watching", True, (0, 1)

        def scores(self, known: Any) -> np.ndarray:
            seen.append(known)
            return known.deviation.sum(axis=(1, 2))

    _, kv = blend(engine, Blend(0.1, Watching()))
    (known,) = seen
    for layer in (0, 1):
        weights = own[layer][0].numpy()
        shares = [weights[:, at, 1:10].sum(-1) for at in range(10, 150)]
        shares += [weights[:, at, 1:150].sum(-1) for at in range(150, 290)]
        np.testing.assert_allclose(known.mass[layer], shares, atol=1e-5)
    for part, (fresh, cached) in enumerate(zip(kv.layer(1), fetched(engine).layer(1), strict=True)):
        norms = np.linalg.norm(fresh[:, 10:290] - cached[:, 10:290], axis=-1).T
        np.testing.assert_allclose(known.deviation[..., part], norms, atol=1e-5)


def test_long_prompts_are_attended_to_some_queries_at_a_time(llama: LayeredTransformer) -> None:
    ids = np.random.default_rng(0).integers(0, 160, 700)
    whole, parts = (KVBuffers.allocate(llama.spec, 700) for _ in range(2))
    want = llama.run(ids, whole, 0)
    got = run(llama, ids, parts, 0, [], Blend())
    assert relative(got.logits, want) < 1e-5
    for ours, theirs in zip(parts.layer(3), whole.layer(3), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_an_engine_or_a_model_with_its_options_is_taken() -> None:
    model = build("LlamaConfig", {})
    engine = TransformersEngine(model, weights=b"w" * 32)
    made, same = LayeredTransformer(engine), LayeredTransformer(model, weights=b"w" * 32)
    assert made.engine is engine and made.spec == same.spec
    assert made.shape == (4, 64, 4, 2, 16, 96, (None,) * 4)


@pytest.mark.parametrize(
    ("config", "fields"),
    [("GPTNeoXConfig", {}), ("PhiConfig", {}), ("CohereConfig", {}), ("OlmoConfig", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_architectures_are_refused_by_name(config: str, fields: dict[str, Any]) -> None:
    name = config.removesuffix("Config")
    with pytest.raises(
        SpecError, match=rf"{name}ForCausalLM cannot be run layer by layer; supported are Llama"
    ):
        LayeredTransformer(build(config, fields | {"num_key_value_heads": 4}))


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
def test_k02_a_model_that_computes_something_else_than_its_class_says_is_refused(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 3 % in one layer, or in the logits: each layer is compared by itself, so errors do not add up."""
    modeling = transformers.models.llama.modeling_llama
    sdpa, layer, head = (
        transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"],
        modeling.LlamaDecoderLayer.forward,
        modeling.LlamaForCausalLM.forward,
    )

    def other_attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        mixed, weights = sdpa(module, *args, **kwargs)
        return mixed * (1.03 if module.layer_idx == 2 else 1), weights

    def other_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        return layer(self, *args, **kwargs) * (1.03 if self.self_attn.layer_idx == 1 else 1)

    def other_head(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = head(self, *args, **kwargs)
        out.logits = 1.03 * out.logits
        return out

    transformers.AttentionInterface.register("sdpa_of_mine", other_attention)
    transformers.AttentionMaskInterface.register(
        "sdpa_of_mine", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    mine = build("LlamaConfig", {"attn_implementation": "sdpa_of_mine"}, dtype)
    differ = r"differ from its own forward by \d\.\de[-+]\d\d, more than rounding"
    with pytest.raises(SpecError, match=f"its attention of layer 2 {differ}"):
        LayeredTransformer(mine)
    for cls, forward, what in (
        (modeling.LlamaDecoderLayer, other_layer, "output of layer 1"),
        (modeling.LlamaForCausalLM, other_head, "logits"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(cls, "forward", forward)
            with pytest.raises(SpecError, match=f"its {what} {differ}"):
                LayeredTransformer(build("LlamaConfig", {}, dtype))


@pytest.mark.parametrize("where", ["", "model", "model.layers.1", "model.layers.3.self_attn"])
def test_k02_what_is_attached_to_parts_that_are_not_called_is_refused(where: str) -> None:
    def steer(module: Any, args: Any, out: Any) -> None:
        return None

    model = build("LlamaConfig", {})
    part = model.get_submodule(where)
    hook = part.register_forward_hook(steer)
    with pytest.raises(SpecError, match=rf"{where or 'the model'} has a forward hook \(.*steer\)"):
        LayeredTransformer(model)
    hook.remove()
    engine = LayeredTransformer(model)
    part.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(SpecError, match="has a forward hook"):  # also where it comes later
        engine.embed(IDS, np.arange(len(IDS)))
    part._forward_pre_hooks.clear()
    part.forward = part.forward
    with pytest.raises(SpecError, match=f"the forward of {where} was replaced"):
        LayeredTransformer(model)


def test_hooks_on_what_is_called_are_called() -> None:
    model = build("LlamaConfig", {})
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: 1.5 * out)
    engine = LayeredTransformer(model)
    kv = KVBuffers.allocate(engine.spec, len(IDS))
    assert (
        relative(run(engine, IDS, kv, 0, (), Blend(1.0)).logits, cold(engine)[0].logits[0, -1].numpy()) < 1e-5
    )


def test_k02_other_classes_under_the_same_names_are_refused() -> None:
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        pass

    class LlamaAttention(transformers.models.llama.modeling_llama.LlamaAttention):
        pass

    model = build("LlamaConfig", {})
    model.model.layers[2].self_attn.__class__ = LlamaAttention
    with pytest.raises(SpecError, match=r"model\.layers\.2\.self_attn is a \S*test_layered\.LlamaAttention"):
        LayeredTransformer(model)
    model = build("LlamaConfig", {})
    model.__class__ = LlamaForCausalLM
    with pytest.raises(SpecError, match=r"test_layered\.LlamaForCausalLM is not transformers\."):
        LayeredTransformer(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gemmas_cap_on_logits_is_applied(dtype: str) -> None:
    fields = SHAPES["gemma3"][1] | {"final_logit_softcapping": 1.0}
    engine = LayeredTransformer(build("Gemma3TextConfig", fields, getattr(torch, dtype)))
    want, _ = cold(engine)
    got = run(engine, IDS, KVBuffers.allocate(engine.spec, len(IDS)), 0, (), Blend(1.0))
    assert np.abs(got.logits).max() <= 1.0
    assert relative(got.logits, want.logits[0, -1].float().numpy()) < 1e-2
    rows = engine.logits(got.hidden)
    assert rows.shape == (len(got.hidden), 160) and relative(rows[-1], got.logits) < 1e-2


@pytest.mark.parametrize("fields", [{"layer_types": ["sliding_attention"] * 4}, {"sliding_window": 50}])
def test_windows_that_the_model_does_not_have_are_refused(fields: dict[str, Any]) -> None:
    """A specification that somebody else read otherwise: 24 tokens would not show it."""
    model = build("LlamaConfig", {})
    engine = TransformersEngine(model)
    groups = (dataclasses.replace(engine.spec.groups[0], window=50),)
    engine.spec = dataclasses.replace(engine.spec, groups=groups)
    with pytest.raises(SpecError, match="layer 0 attends to all tokens, its config says to the last 50"):
        LayeredTransformer(engine)
    with pytest.raises(SpecError, match=r"'layer_types'|'sliding_window'"):
        LayeredTransformer(build("LlamaConfig", {"sliding_window": 50} | fields))


def test_k02_keys_that_move_otherwise_than_the_specification_says_are_refused() -> None:
    engine = TransformersEngine(build("LlamaConfig", {}))
    (group,) = engine.spec.groups
    other = dataclasses.replace(group, rope=dataclasses.replace(group.rope, interleaved=True))
    engine.spec = dataclasses.replace(engine.spec, groups=(other,))
    with pytest.raises(SpecError, match="keys rotated by 1000 positions differ from keys computed there"):
        LayeredTransformer(engine)


def test_shares_of_attention_do_not_overflow_in_float16() -> None:
    def engine(dtype: Any) -> LayeredTransformer:
        model = build("Qwen2Config", {}, dtype)
        for block in model.model.layers:  # scores of 76,800 before they are scaled
            block.self_attn.k_proj.bias.data.fill_(60.0)
            block.self_attn.q_proj.bias.data.fill_(80.0)
        return LayeredTransformer(model)

    def shares(engine: LayeredTransformer) -> np.ndarray:
        kv = KVBuffers.allocate(engine.spec, 64)
        rows = engine.project(0, engine.embed(IDS[:64], np.arange(64)))
        engine.keep(0, rows, kv)
        return engine.mass(0, rows, kv, np.zeros(64, int), np.full(64, 32))

    narrow, wide = shares(engine(torch.float16)), shares(engine(torch.float32))
    assert np.isfinite(narrow).all() and np.abs(narrow.sum() / wide.sum() - 1) < 0.1
    broken = engine(torch.float16)
    kv = KVBuffers.allocate(broken.spec, 64)
    rows = broken.project(0, broken.embed(IDS[:64], np.arange(64)))
    broken.keep(0, rows, kv)
    kv.layer(0)[0][:] = np.nan
    with pytest.raises(SpecError, match=r"layer 0: attention is NaN.*torch\.float16; load the model in bf"):
        broken.mass(0, rows, kv, np.zeros(64, int), np.full(64, 32))


def test_a_model_of_one_layer_reuses_exactly_and_says_why_it_does_not_blend() -> None:
    engine = LayeredTransformer(build("LlamaConfig", {"num_hidden_layers": 1}))
    found = parity.measure(engine, [IDS[:40], IDS[40:80], IDS[80:120]], IDS[120:130])
    assert found.passed and found.order == {} and "one layer has nothing to repair" in found.refusal
    with pytest.raises(SpecError, match="one layer has nothing to repair"):
        run(engine, IDS, KVBuffers.allocate(engine.spec, len(IDS)), 0, (), Blend())


@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_documents_move_through_a_server_and_are_repaired(shape: str) -> None:
    engine = LayeredTransformer(build(*SHAPES[shape], torch.bfloat16))
    head, first, second = IDS[:64], IDS[64:160], IDS[160:288]
    stored = np.concatenate([head, first, second, IDS[288:]])
    asked = np.concatenate([head, IDS[:3], second, first, IDS[:9]])
    cold = prefill(engine, asked).logits
    errors = []
    with (
        local_server("64MiB") as ready,
        connect_sync(
            ready["uris"][0], model=engine.spec, codec="int8", tenant=TenantKey.public(), deadline=30.0
        ) as client,
    ):
        assert generate(engine, stored, 1, client).store.stored == 18
        for ratio in (0.0, 0.3, 1.0):
            got = prefill(engine, asked, client, blend=Blend(ratio))
            assert [(span.start, span.stop) for span in got.fetch.modular] == [(67, 195), (195, 291)]
            assert got.report is not None and got.report.exact == 64 and got.report.reused == 224
            errors.append(relative(got.logits, cold))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 5e-2
