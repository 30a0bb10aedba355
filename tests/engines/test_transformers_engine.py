"""Transformers models through their public cache API: exact reuse, no copies, refusals by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra: pip install 'hypercache-llm[transformers]'")
transformers = pytest.importorskip("transformers", reason="transformers is an extra")

from hypercache.engines.transformers import TransformersEngine  # noqa: E402
from hypercache.errors import SpecError  # noqa: E402
from hypercache.kv import KVBuffers  # noqa: E402
from hypercache.model import Adapter, KVDtype  # noqa: E402

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}
GQA = {**SMALL, "num_key_value_heads": 2}
MLA = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
}
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GQA),
    "llama yarn": ("LlamaConfig", {**GQA, "rope_parameters": YARN}),
    "qwen2": ("Qwen2Config", GQA),
    "qwen3, wide heads": ("Qwen3Config", {**GQA, "head_dim": 32}),
    "mistral, one K/V head": ("MistralConfig", {**GQA, "num_key_value_heads": 1, "sliding_window": None}),
    "gpt-neox, partial": ("GPTNeoXConfig", SMALL),
    "gpt-j, interleaved": ("GPTJConfig", {**GPT, "rotary_dim": 8}),
    "deepseek-v3, latent": ("DeepseekV3Config", MLA),
}
IDS = torch.randint(3, 120, (1, 50), generator=torch.Generator().manual_seed(7))


def build(config: str, fields: dict[str, Any], dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**fields), dtype=dtype
    )
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> TransformersEngine:
    return TransformersEngine(build("LlamaConfig", GQA))


def cold(engine: TransformersEngine, ids: Any = IDS) -> tuple[np.ndarray, Any]:
    """The model alone, as its users run it."""
    with torch.inference_mode():
        cache = transformers.DynamicCache(config=engine.model.config)
        logits = engine.model(input_ids=ids, cache=cache, use_cache=True).logits
    return logits[0, -1].float().numpy(), cache


def fetched(kv: KVBuffers, tokens: int, room: int) -> KVBuffers:
    """Another process's memory with the first ``tokens`` in place and poison behind them."""
    out = KVBuffers.allocate(kv.spec, room)
    for i in range(kv.spec.num_layers):
        for target, source in zip(out.layer(i), kv.layer(i), strict=True):
            target.view(np.uint8)[:] = 0x7B
            target[:, :tokens] = source[:, :tokens]
    return out


@pytest.mark.parametrize("case", SUPPORTED.values(), ids=SUPPORTED.keys())
def test_extracted_prefix_injected_elsewhere_continues_exactly(case: tuple[str, dict[str, Any]]) -> None:
    engine = TransformersEngine(build(*case))
    logits, cache = cold(engine)
    for past in (16, 48, 49):
        kv = fetched(engine.extract(cache), past, 64)
        got = engine.run(IDS[0, past:].tolist(), kv, past)
        np.testing.assert_allclose(got, logits, atol=2e-6)
        for i, layer in enumerate(cache.layers):  # what was computed lies next to what was fetched
            for ours, theirs in zip(kv.layer(i), (layer.keys, layer.values), strict=True):
                np.testing.assert_allclose(ours[:, :50], theirs[0].numpy(), atol=2e-6)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ("MistralConfig", {**GQA, "sliding_window": 12}),
        ("Qwen2Config", {**GQA, "sliding_window": 12, "use_sliding_window": True, "max_window_layers": 1}),
        ("Gemma3TextConfig", {**GQA, "head_dim": 16, "sliding_window": 12, "num_hidden_layers": 7}),
    ],
    ids=["mistral", "qwen2", "gemma3"],
)
def test_layers_with_a_sliding_window_are_kept_whole(config: str, fields: dict[str, Any]) -> None:
    engine = TransformersEngine(build(config, fields))
    logits, cache = cold(engine)
    whole = KVBuffers.allocate(engine.spec, 50)
    np.testing.assert_allclose(engine.run(IDS[0].tolist(), whole, 0), logits, atol=2e-6)
    for past in (8, 16, 48):  # within the window, just behind it, far behind it
        kv = fetched(whole, past, 64)
        np.testing.assert_allclose(engine.run(IDS[0, past:].tolist(), kv, past), logits, atol=2e-6)
    want = engine.model.generate(IDS, max_new_tokens=8, do_sample=False)
    kv = fetched(whole, 48, 80)
    assert torch.equal(engine.model.generate(IDS, cache=engine.inject(kv, 48), max_new_tokens=8), want)
    with pytest.raises(SpecError, match="keeps a DynamicSlidingWindowLayer"):  # which forgot the rest
        engine.extract(cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_moves_bit_for_bit_and_greedy_tokens_agree(dtype: str) -> None:
    engine = TransformersEngine(build("LlamaConfig", GQA, getattr(torch, dtype)))
    assert (
        engine.spec.layout(0).dtype.value == {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    )
    _, cache = cold(engine)
    kv = fetched(engine.extract(cache), 48, 80)
    for i, layer in enumerate(cache.layers):
        back = torch.from_numpy(kv.layer(i)[0][:, :48].copy()).view(getattr(torch, dtype))
        assert torch.equal(back, layer.keys[0, :, :48])
    want = engine.model.generate(IDS, max_new_tokens=8, do_sample=False)
    got = engine.model.generate(IDS, cache=engine.inject(kv, 48), max_new_tokens=8, do_sample=False)
    assert torch.equal(got, want)


def test_extract_lends_the_caches_memory_and_inject_uses_the_buffers(llama: TransformersEngine) -> None:
    _, cache = cold(llama)
    kv = llama.extract(cache, 32)
    assert kv.tokens == 32
    assert kv.layer(1)[0].ctypes.data == cache.layers[1].keys.data_ptr()
    room = fetched(kv, 32, 64)
    injected = llama.inject(room, 32)
    assert injected.get_seq_length() == 32
    assert injected.layers[2].values.data_ptr() == room.layer(2)[1].ctypes.data
    with torch.inference_mode():
        llama.model(input_ids=IDS[:, 32:], cache=injected, use_cache=True)
    assert injected.layers[2].values.data_ptr() == room.layer(2)[1].ctypes.data
    assert llama.extract(injected).layer(0)[1].ctypes.data == room.layer(0)[1].ctypes.data


def test_a_cache_outgrows_its_buffers_without_harm(llama: TransformersEngine) -> None:
    _, cache = cold(llama)
    kv = fetched(llama.extract(cache), 48, 52)
    want = llama.model.generate(IDS, max_new_tokens=12, do_sample=False)
    got = llama.model.generate(IDS, cache=llama.inject(kv, 48), max_new_tokens=12, do_sample=False)
    assert torch.equal(got, want)


def test_beam_search_leaves_the_buffers_alone(llama: TransformersEngine) -> None:
    _, cache = cold(llama)
    kv = fetched(llama.extract(cache), 48, 80)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    want = llama.model.generate(IDS, **options)
    beams = llama.inject(kv, 48)
    beams.batch_repeat_interleave(3)
    assert torch.equal(llama.model.generate(IDS, cache=beams, **options), want)
    np.testing.assert_array_equal(kv.layer(0)[0][:, :48], llama.extract(cache).layer(0)[0][:, :48])


def test_the_past_is_read_only_after_its_layer_is_ready_and_in_order(llama: TransformersEngine) -> None:
    logits, cache = cold(llama)
    whole = llama.extract(cache)
    arriving = fetched(whole, 0, 64)
    seen: list[int] = []

    def layer_ready(i: int) -> None:
        seen.append(i)
        for target, source in zip(arriving.layer(i), whole.layer(i), strict=True):
            target[:, :48] = source[:, :48]

    got = llama.run(IDS[0, 48:].tolist(), arriving, 48, layer_ready)
    assert seen == [0, 1, 2]
    np.testing.assert_allclose(got, logits, atol=2e-6)


def test_e09_a_refusal_at_layer_k_is_healed_by_recomputing_all_layers(llama: TransformersEngine) -> None:
    logits, cache = cold(llama)
    broken = fetched(llama.extract(cache), 48, 64)
    for part in broken.layer(1):
        part[:, :48] = np.nan

    def layer_ready(i: int) -> None:
        if i == 1:
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        llama.run(IDS[0, 48:].tolist(), broken, 48, layer_ready)
    np.testing.assert_allclose(llama.run(IDS[0].tolist(), broken, 0), logits, atol=2e-6)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (
            "MambaConfig",
            {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128},
            "LinearAttentionLayer",
        ),
        ("GPT2Config", GPT, "GPT2LMHeadModel has no rotary"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(config: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TransformersEngine(build(config, fields))


def test_encoder_decoders_other_dtypes_and_devices_are_refused() -> None:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    with pytest.raises(SpecError, match="T5ForConditionalGeneration is an encoder-decoder"):
        TransformersEngine(transformers.T5ForConditionalGeneration(config).eval())
    with pytest.raises(SpecError, match=r"computes in torch\.float64"):
        TransformersEngine(build("LlamaConfig", GQA, torch.float64))
    with pytest.raises(SpecError, match="is on meta"):
        TransformersEngine(build("LlamaConfig", GQA).to("meta"))


def test_caches_that_do_not_fit_are_refused(llama: TransformersEngine) -> None:
    with torch.inference_mode():
        batch = transformers.DynamicCache(config=llama.model.config)
        llama.model(input_ids=IDS.expand(2, -1), cache=batch, use_cache=True)
    with pytest.raises(SpecError, match="layer 0: the cache holds a batch of 2"):
        llama.extract(batch)
    static = transformers.StaticCache(config=llama.model.config, max_cache_len=64)
    with pytest.raises(SpecError, match="StaticCache"):
        llama.extract(static)
    with pytest.raises(SpecError, match="layer 0 of the cache is empty"):
        llama.extract(transformers.DynamicCache(config=llama.model.config))
    other = TransformersEngine(build("LlamaConfig", {**GQA, "num_key_value_heads": 4}))
    with pytest.raises(SpecError, match="layer 0, part 'k': heads must be 4, got 2"):  # J04, J05
        other.extract(cold(llama)[1])
    with pytest.raises(SpecError, match="another model"):
        other.inject(KVBuffers.allocate(llama.spec, 64), 0)
    with pytest.raises(SpecError, match=r"outside the 0\.\.64"):
        llama.inject(KVBuffers.allocate(llama.spec, 64), 65)
    with pytest.raises(SpecError, match=r"room for 64 tokens cannot take positions 60\.\.110"):
        llama.run(IDS[0].tolist(), KVBuffers.allocate(llama.spec, 64), 60)
    with pytest.raises(SpecError, match="last one out of the past"):  # L05
        llama.run([], KVBuffers.allocate(llama.spec, 64), 60)


def test_identity_follows_the_parameters_not_the_name(tmp_path: Any) -> None:
    model = build("LlamaConfig", GQA)
    first = TransformersEngine(model).spec
    assert first == TransformersEngine(build("LlamaConfig", GQA)).spec
    assert first.layout(0).dtype is KVDtype.FP32
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0, 0] += 1e-3
    assert TransformersEngine(model).spec.fingerprint() != first.fingerprint()
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    specs = [TransformersEngine(model, weights=tmp_path / name).spec for name in "ab"]  # B05
    assert specs[0] == specs[1]
    digest = TransformersEngine(model, weights=b"d" * 32, adapter=Adapter("x", b"1" * 16)).spec  # A01
    assert digest.fingerprint() != TransformersEngine(model, weights=b"d" * 32).spec.fingerprint()


def test_a01_adapter_layers_need_an_identity() -> None:
    model = build("LlamaConfig", GQA)
    model.peft_config = {"default": object()}
    with pytest.raises(SpecError, match=r"carries adapter layers: pass adapter="):
        TransformersEngine(model, weights=b"d" * 32)
    assert TransformersEngine(model).spec.adapter is None  # the parameters in memory are hashed


def test_what_is_no_loaded_causal_lm_is_refused() -> None:
    for model in ("meta-llama/Llama-3.2-1B", None, transformers.LlamaConfig(**GQA), torch.nn.Linear(2, 2)):
        with pytest.raises(SpecError, match=r"needs a loaded model, got \w+; load it with .*from_pretrained"):
            TransformersEngine(model)
    with pytest.raises(SpecError, match=r"LlamaModel has no logits; load it with .*AutoModelForCausalLM"):
        TransformersEngine(transformers.LlamaModel(transformers.LlamaConfig(**GQA)).eval())
    for weights in (7, ["a"], bytearray(32)):
        with pytest.raises(SpecError, match=r"weights must be a digest in bytes, a path or None, got"):
            TransformersEngine(build("LlamaConfig", GQA), weights=weights)


def test_a_model_in_training_mode_is_refused_whenever_it_is_used() -> None:
    fields = {**GQA, "attention_dropout": 0.5}
    with pytest.raises(SpecError, match=r"training mode: dropout makes K/V random; call model\.eval\(\)"):
        TransformersEngine(build("LlamaConfig", fields).train())
    half = build("LlamaConfig", fields)
    half.model.layers[1].train()
    with pytest.raises(SpecError, match="training mode"):
        TransformersEngine(half)
    engine = TransformersEngine(half.eval())
    engine.model.train()
    with pytest.raises(SpecError, match="training mode"):
        engine.run([5, 6], KVBuffers.allocate(engine.spec, 2), 0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_keys_that_depend_on_the_prompts_length_are_refused(rope: dict[str, Any]) -> None:
    model = build("LlamaConfig", {**GQA, "max_position_embeddings": 32, "rope_parameters": rope})
    with torch.inference_mode():
        first = [model(input_ids=ids, use_cache=True).past_key_values for ids in (IDS[:, :20], IDS)]
    short, long = (cache.layers[0].keys[:, :, :20] for cache in first)
    assert not torch.allclose(short, long, atol=1e-2)  # so it is: the same prefix, other keys
    with pytest.raises(SpecError, match=rf"rotates by '{rope['rope_type']}' RoPE: .*set another rope_type"):
        TransformersEngine(model)


def test_a_type_that_is_not_known_needs_its_users_word() -> None:
    model = build("DogeConfig", GQA)
    with pytest.raises(SpecError, match=r"model_type 'doge'.*assume_standard=True"):
        TransformersEngine(model)
    assert TransformersEngine(model, assume_standard=True).spec.num_layers == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ("LlamaConfig", GQA),
        ("Gemma3TextConfig", {**GQA, "head_dim": 16}),
        ("GPTJConfig", {**GPT, "rotary_dim": 8}),
    ],
    ids=["llama", "gemma3", "gpt-j"],
)
def test_a_model_that_was_cast_as_a_whole_is_refused(
    config: str, fields: dict[str, Any], dtype: Any, tmp_path: Any
) -> None:
    """The checkpoint is the same, its keys are not: they would be served to each other as exact."""
    build(config, fields).save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    for weights in (None, b"w" * 32, tmp_path):
        assert TransformersEngine(load(tmp_path, dtype=dtype).eval(), weights=weights).spec.num_layers == 3
        with pytest.raises(
            SpecError, match=r"are torch\.\w+, not float32: .*from_pretrained\(\.\.\., dtype="
        ):
            TransformersEngine(load(tmp_path, dtype=torch.float32).to(dtype).eval(), weights=weights)
        back = load(tmp_path, dtype=dtype).to(dtype).to(torch.float32)  # in float32, but rounded
        with pytest.raises(SpecError, match=r"the rotary frequencies .* are not those of its config .*cast"):
            TransformersEngine(back.eval(), weights=weights)


def test_gemmas_factor_of_embeddings_is_in_no_checkpoint_either() -> None:
    fields = {**GQA, "head_dim": 16, "hidden_size": 72}  # its root is no float16
    model = build("Gemma3TextConfig", fields)
    model.model.embed_tokens.embed_scale.data = model.model.embed_tokens.embed_scale.half().float()
    with pytest.raises(SpecError, match=r"embed_scale is 8\.48\d*, not 8\.485\d* as torch\.float32 gives it"):
        TransformersEngine(model)


def test_buffers_that_no_checkpoint_holds_and_no_config_tells_of_are_in_the_identity() -> None:
    def spec(offset: float | None) -> Any:
        model = build("LlamaConfig", GQA)
        if offset is not None:
            model.model.register_buffer("steering", torch.full((4,), offset), persistent=False)
        return TransformersEngine(model, weights=b"w" * 32).spec

    plain, one, other = spec(None), spec(1.0), spec(2.0)
    assert plain.weights == b"w" * 32  # nothing is added where nothing is to be told
    assert len({each.fingerprint() for each in (plain, one, other)}) == 3
    assert spec(1.0) == one


def test_k_v_of_another_shape_than_the_config_tells_are_found_out() -> None:
    with pytest.raises(
        SpecError, match=r"keeps other K/V than its config says: layer 0.*heads must be 2, got 4"
    ):
        TransformersEngine(build("GPTNeoXConfig", GQA))  # which has no such key


def test_models_that_do_not_lie_whole_in_memory_in_one_dtype_are_refused() -> None:
    model = build("LlamaConfig", GQA)
    model.model.layers[2].to("meta")
    with pytest.raises(SpecError, match=r"model\.layers\.2\.\S+ is on meta, which holds no data"):
        TransformersEngine(model)
    for part in ("model.layers.2.self_attn", "model.layers.1.mlp", "lm_head"):
        model = build("LlamaConfig", GQA)
        model.get_submodule(part).to(torch.bfloat16)
        with pytest.raises(
            SpecError, match=rf"does not run, not even one token: RuntimeError.*{part}\.\S+ is torch.bf"
        ):
            TransformersEngine(model)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_weights_need_a_digest() -> None:
    layer = torch.nn.Linear(4, 4)
    model = build("LlamaConfig", GQA)
    weight = torch.quantize_per_tensor(layer.weight.detach(), 0.1, 0, torch.qint8)
    model.model.register_buffer("packed", weight)
    with pytest.raises(SpecError, match=r"model\.packed is quantised or packed.*pass weights="):
        TransformersEngine(model)
    assert TransformersEngine(model, weights=b"w" * 32).spec.weights == b"w" * 32
