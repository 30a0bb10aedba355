"""What the bytes mean: specs, layouts, fingerprints (cases A01, A02, A04, A08, J01, J02, J03)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hypercache.errors import SpecError
from hypercache.identity import encode
from hypercache.model import Adapter, KVDtype, KVLayout, LayerGroup, ModelSpec, Part, RopeSpec


def split(heads: int, k: int, v: int | None = None, dtype: KVDtype = KVDtype.BF16) -> KVLayout:
    return KVLayout("split", heads, (Part("k", k), Part("v", k if v is None else v)), dtype)


def mla(latent: int = 512, rope: int = 64) -> KVLayout:
    return KVLayout("mla", 1, (Part("latent", latent), Part("rope", rope)), KVDtype.BF16)


LINEAR = RopeSpec("linear", 1e6, 64, scaling=(("factor", 8.0),))
SPEC = ModelSpec(
    weights=b"w" * 32,
    groups=(
        LayerGroup((0, 2), split(4, 64), RopeSpec("default", 1e4, 64), window=512),
        LayerGroup((1, 3), split(8, 64, 32), LINEAR),
    ),
    adapter=Adapter("lora", b"a" * 32),
    numerics=b"n" * 32,
    name="tiny",
)


# --- fingerprints ------------------------------------------------------------------------------------


def mutations() -> dict[str, ModelSpec]:
    """SPEC with one thing changed at a time: every field of every part of it."""
    first, second = SPEC.groups

    def group(**change: Any) -> ModelSpec:
        return dataclasses.replace(SPEC, groups=(first, dataclasses.replace(second, **change)))

    def layout(**change: Any) -> ModelSpec:
        return group(layout=dataclasses.replace(second.layout, **change))

    def rope(**change: Any) -> ModelSpec:
        return group(rope=dataclasses.replace(LINEAR, **change))

    return {
        "weights": dataclasses.replace(SPEC, weights=b"w" * 31 + b"x"),
        "weights length": dataclasses.replace(SPEC, weights=b"w" * 31),
        "adapter": dataclasses.replace(SPEC, adapter=Adapter("lora", b"b" * 32)),
        "no adapter": dataclasses.replace(SPEC, adapter=None),
        "numerics": dataclasses.replace(SPEC, numerics=b"m" * 32),
        "no numerics": dataclasses.replace(SPEC, numerics=b""),
        "tp_size": dataclasses.replace(SPEC, tp_size=2),
        "tp_rank": dataclasses.replace(SPEC, tp_size=2, tp_rank=1),
        "swapped layers": dataclasses.replace(
            SPEC,
            groups=(dataclasses.replace(first, layers=(1, 3)), dataclasses.replace(second, layers=(0, 2))),
        ),
        "layers": group(layers=(1, 3, 4)),
        "window": group(window=512),
        "heads": layout(heads=16),
        "k dim": layout(parts=(Part("k", 65), Part("v", 32))),
        "v dim": layout(parts=(Part("k", 64), Part("v", 33))),
        "dims swapped": layout(parts=(Part("k", 64), Part("v", 64))),
        "dtype": layout(dtype=KVDtype.FP16),
        "mla": group(layout=mla()),
        "rope kind": rope(kind="dynamic"),
        "no rope": group(rope=RopeSpec("none", 0.0, 0)),
        "theta": rope(theta=1e6 + 1),
        "rotary_dim": rope(rotary_dim=32),
        "interleaved": rope(interleaved=True),
        "scaling value": rope(scaling=(("factor", 4.0),)),
        "scaling key": rope(scaling=(("attention_factor", 8.0),)),
        "no scaling": rope(scaling=()),
        "more scaling": rope(scaling=(("factor", 8.0), ("truncate", True))),
    }


def test_every_field_reaches_the_fingerprint() -> None:
    seen = {"unchanged": SPEC.fingerprint()} | {
        what: spec.fingerprint() for what, spec in mutations().items()
    }
    assert len(SPEC.fingerprint()) == 32
    assert len(set(seen.values())) == len(seen), sorted(seen.items(), key=lambda item: item[1])


def test_kv_scales_reach_the_fingerprint() -> None:
    groups = (LayerGroup((0, 1), split(2, 8, dtype=KVDtype.FP8_E4M3), RopeSpec("none", 0.0, 0)),)
    scales = [
        ((1.0, 1.0), (1.0, 1.0)),
        ((1.0, 1.0), (1.0, 2.0)),
        ((1.0, 1.0), (2.0, 1.0)),
        ((1.0, 2.0), (1.0, 1.0)),
    ]
    specs = [ModelSpec(weights=b"w" * 32, groups=groups, kv_scales=given) for given in scales]
    assert len({spec.fingerprint() for spec in specs}) == 4
    e5m2 = (dataclasses.replace(groups[0], layout=split(2, 8, dtype=KVDtype.FP8_E5M2)),)
    assert (
        ModelSpec(weights=b"w" * 32, groups=e5m2, kv_scales=scales[0]).fingerprint() != specs[0].fingerprint()
    )


def test_a02_names_are_labels() -> None:
    renamed = dataclasses.replace(SPEC, name="/root/.cache/2d5f1fab", adapter=Adapter("other", b"a" * 32))
    assert renamed.fingerprint() == SPEC.fingerprint()
    with pytest.raises(SpecError, match="a name alone is not an identity"):
        Adapter("lora", b"lora")
    with pytest.raises(SpecError, match="a name or path is not an identity"):
        dataclasses.replace(SPEC, weights=b"gpt2")


def test_equal_meaning_is_one_fingerprint() -> None:
    first, second = SPEC.groups
    reordered = dataclasses.replace(SPEC, groups=(second, first))
    cut = dataclasses.replace(
        SPEC,
        groups=(dataclasses.replace(first, layers=(2,)), second, dataclasses.replace(first, layers=(0,))),
    )
    numpy = LayerGroup(
        (1, 3),
        KVLayout("split", np.int64(8), (Part("k", np.uint8(64)), Part("v", np.int32(32))), KVDtype.BF16),  # type: ignore[arg-type]
        RopeSpec("linear", 1000000, np.int16(64), scaling=(("factor", 8),)),  # type: ignore[arg-type]
    )
    for same in (reordered, cut, dataclasses.replace(SPEC, groups=(first, numpy))):
        assert same.fingerprint() == SPEC.fingerprint()
    # What a model without rotary embedding was given as theta means nothing.
    none = [LayerGroup((0,), split(1, 8), RopeSpec("none", theta, 0)) for theta in (0.0, 1e4)]
    assert none[0].fields() == none[1].fields()
    ordered = RopeSpec("yarn", 1e4, 8, scaling=(("beta_fast", 32), ("factor", 4)))
    assert ordered == RopeSpec("yarn", 1e4, 8, scaling=(("factor", 4), ("beta_fast", 32)))


# --- layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 24, 28, 61, 78, 93])
@pytest.mark.parametrize("heads", [1, 2, 8, 40])
def test_j03_any_number_of_layers_and_heads(layers: int, heads: int) -> None:
    spec = ModelSpec(
        weights=b"w" * 32,
        groups=(LayerGroup(tuple(range(layers)), split(heads, 16), RopeSpec("default", 1e4, 16)),),
    )
    assert spec.num_layers == layers
    assert {spec.layout(layer).heads for layer in range(layers)} == {heads}
    assert spec.layout(0).chunk_nbytes(16) == heads * 16 * 32 * 2
    assert spec.token_nbytes() == layers * heads * 32 * 2
    for layer in (-1, layers):
        with pytest.raises(SpecError, match=rf"has layers 0\.\.{layers - 1}, asked for {layer}"):
            spec.layout(layer)


def test_j01_k_and_v_of_different_dims_and_a_latent() -> None:
    assert split(2, 192, 128).chunk_nbytes(16) == 2 * 16 * 320 * 2
    assert mla().chunk_nbytes(16) == 16 * 576 * 2
    assert mla().head_elements == 576
    spec = ModelSpec(
        weights=b"w" * 32, groups=(LayerGroup((0,), mla(), RopeSpec("default", 1e4, 64)),), tp_size=8
    )
    assert spec.layout(0) == mla()
    with pytest.raises(SpecError, match="exactly one latent head, got 2"):
        KVLayout("mla", 2, mla().parts, KVDtype.BF16)


def test_j02_shapes_alternate_within_a_model() -> None:
    local, wide = split(16, 256), split(4, 512)
    spec = ModelSpec(
        weights=b"w" * 32,
        groups=(
            LayerGroup((0, 2, 4), local, RopeSpec("default", 1e4, 256), window=1024),
            LayerGroup((1, 3, 5), wide, RopeSpec("default", 1e6, 128)),
        ),
        tp_size=4,
        tp_rank=3,
    )
    assert [spec.layout(n).heads for n in range(6)] == [4, 1] * 3
    assert [spec.group_of(n).rope.theta for n in range(6)] == [1e4, 1e6] * 3
    assert [spec.head_range(n) for n in range(2)] == [(12, 16), (3, 4)]
    assert spec.token_nbytes() == 3 * (4 * 512 + 1 * 1024) * 2


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_ranks_hold_contiguous_heads(heads: int, tp_size: int) -> None:
    whole = LayerGroup((0,), split(heads, 16), RopeSpec("default", 1e4, 16))
    ranks = [
        ModelSpec(weights=b"w" * 32, groups=(whole,), tp_rank=rank, tp_size=tp_size)
        for rank in range(tp_size)
    ]
    ranges = [rank.head_range(0) for rank in ranks]
    held = [head for first, stop in ranges for head in range(first, stop)]
    assert held == sorted(head for head in range(heads) for _ in range(max(1, tp_size // heads)))
    # The ranks' chunks are slices of the whole model's chunk, and make it up again.
    chunk = np.random.default_rng(0).integers(0, 256, whole.layout.chunk_nbytes(16), np.uint8)
    view = chunk.reshape(heads, -1)
    for rank, (first, stop) in zip(ranks, ranges, strict=True):
        mine = chunk[whole.layout.head_slice(16, first, stop)]
        assert mine.nbytes == rank.layout(0).chunk_nbytes(16)
        np.testing.assert_array_equal(mine, view[first:stop].ravel())
    assert len({rank.fingerprint() for rank in ranks}) == tp_size


def test_heads_that_cannot_be_split_are_refused() -> None:
    group = LayerGroup((0,), split(3, 16), RopeSpec("default", 1e4, 16))
    for tp_size in (2, 4):
        with pytest.raises(SpecError, match=f"3 KV heads cannot be split over tp_size={tp_size}"):
            ModelSpec(weights=b"w" * 32, groups=(group,), tp_size=tp_size)
    for first, stop in ((-1, 1), (2, 2), (0, 4)):
        with pytest.raises(SpecError, match=r"are outside 0\.\.3"):
            group.layout.head_slice(16, first, stop)


def test_dtypes_have_the_size_of_what_they_carry() -> None:
    assert {dtype.value: dtype.itemsize for dtype in KVDtype} == {
        "bf16": 2,
        "fp16": 2,
        "fp32": 4,
        "fp8_e4m3": 1,
        "fp8_e5m2": 1,
    }
    assert [dtype for dtype in KVDtype if dtype.is_fp8] == [KVDtype.FP8_E4M3, KVDtype.FP8_E5M2]


# --- bad specs ---------------------------------------------------------------------------------------

ROPE = RopeSpec("default", 1e4, 8)
GROUP = LayerGroup((0,), split(2, 8), ROPE)
FP8 = LayerGroup((0,), split(2, 8, dtype=KVDtype.FP8_E4M3), ROPE)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: KVLayout("paged", 1, (), KVDtype.BF16), "'paged' is unknown; use 'split' or 'mla'"),
        (lambda: KVLayout("split", 1, mla().parts, KVDtype.BF16), "needs parts"),
        (lambda: split(0, 8), "KVLayout.heads must be an integer >= 1, got 0"),
        (lambda: split(2.0, 8), "KVLayout.heads must be an integer >= 1, got 2.0"),  # type: ignore[arg-type]
        (lambda: split(True, 8), "got True"),
        (lambda: Part("k", -8), "part 'k': dim must be an integer >= 1, got -8"),
        (lambda: RopeSpec("default", 1e4, 7), "must be even and >= 2, got 7"),
        (lambda: RopeSpec("default", 1e4, 0), "must be even and >= 2, got 0"),
        (lambda: RopeSpec("default", float("nan"), 8), "theta must be finite and > 0"),
        (lambda: RopeSpec("default", 0.0, 8), "theta must be finite and > 0"),
        (lambda: RopeSpec("", 1e4, 8), "use 'none' for a model without"),
        (
            lambda: LayerGroup((0,), split(2, 8), RopeSpec("default", 1e4, 10)),
            "exceeds the 8 elements of part 'k'",
        ),
        (
            lambda: LayerGroup((0,), mla(16, 4), RopeSpec("default", 1e4, 8)),
            "exceeds the 4 elements of part 'rope'",
        ),
        (lambda: LayerGroup((0,), split(2, 8), ROPE, window=0), "window must be an integer >= 1, got 0"),
        (lambda: ModelSpec(weights=b"w" * 32, groups=()), "must cover"),
        (
            lambda: ModelSpec(weights=b"w" * 32, groups=(GROUP, GROUP)),
            r"must cover 0\.\.n-1 once each, got \[0, 0\]",
        ),
        (
            lambda: ModelSpec(weights=b"w" * 32, groups=(dataclasses.replace(GROUP, layers=(1,)),)),
            "must cover",
        ),
        (lambda: ModelSpec(weights=b"w" * 15, groups=(GROUP,)), "must have >= 16 bytes, got 15"),
        (lambda: ModelSpec(weights=b"w" * 32, groups=(GROUP,), tp_rank=1), r"tp_rank 1 is not in 0\.\.0"),
        (lambda: ModelSpec(weights=b"w" * 32, groups=(GROUP,), tp_size=0), "tp_size must be an integer >= 1"),
        (lambda: ModelSpec(weights=b"w" * 32, groups=(FP8,)), r"a missing scale is not 1\.0"),
        (
            lambda: ModelSpec(weights=b"w" * 32, groups=(GROUP,), kv_scales=((1.0, 1.0),)),
            "exactly when K/V are kept",
        ),
        (lambda: ModelSpec(weights=b"w" * 32, groups=(FP8,), kv_scales=()), "0 kv_scales for 1 layers"),
        *[
            (
                lambda scale=scale: ModelSpec(weights=b"w" * 32, groups=(FP8,), kv_scales=((1.0, scale),)),
                "finite",
            )
            for scale in (0.0, -1.0, float("nan"), float("inf"))
        ],
    ],
)
def test_bad_specs_name_what_is_wrong(build: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build()


# --- wrong types -------------------------------------------------------------------------------------

ROPE = RopeSpec("default", 1e4, 8)
LAYOUT = KVLayout("split", 2, (Part("k", 8), Part("v", 8)), KVDtype.FP32)
TWO = LayerGroup((0, 1), LAYOUT, ROPE)
WHOLE: dict[type, dict[str, Any]] = {
    RopeSpec: {"kind": "default", "theta": 1e4, "rotary_dim": 8, "interleaved": False, "scaling": ()},
    Part: {"name": "k", "dim": 8},
    KVLayout: {"kind": "split", "heads": 2, "parts": LAYOUT.parts, "dtype": KVDtype.FP32},
    Adapter: {"name": "x", "digest": b"a" * 32},
    LayerGroup: {"layers": (0, 1), "layout": LAYOUT, "rope": ROPE, "window": None},
    ModelSpec: {
        "weights": b"w" * 32,
        "groups": (TWO,),
        "tp_rank": 0,
        "tp_size": 1,
        "adapter": None,
        "kv_scales": None,
        "numerics": b"",
        "name": "",
    },
}
WRONG: tuple[Any, ...] = ("x" * 32, 1.5, True, None, [None], b"x" * 32, {"a": object()}, object())


@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.__name__)
def test_a_field_of_another_type_is_refused_by_name(kind: type) -> None:
    refused = 0
    for name in WHOLE[kind]:
        for value in WRONG:
            try:
                made = kind(**WHOLE[kind] | {name: value})
            except SpecError as error:
                refused += 1
                assert name in str(error), (name, value)
            else:  # then it is a value that means something, to the last byte
                hash(made)
                for part in (made, *getattr(made, "groups", ())):
                    if hasattr(part, "fields"):
                        encode(part.fields())
                assert type(value) is type(WHOLE[kind][name]) or value is None or name == "theta", (
                    name,
                    value,
                )
    assert refused >= 5 * len(WHOLE[kind])


def test_the_remedy_for_a_digest_or_dtype_in_letters() -> None:
    hexed = "ab" * 32
    for field in ({"weights": hexed}, {"numerics": hexed}, {"adapter": hexed}):
        with pytest.raises(SpecError, match=rf"ModelSpec\.{next(iter(field))} must be .*, got str") as raised:
            ModelSpec(**WHOLE[ModelSpec] | field)
        assert hexed not in str(raised.value)
    with pytest.raises(SpecError, match=r"bytes\.fromhex.*hypercache\.engines\.weights\.weights_fingerprint"):
        ModelSpec(**WHOLE[ModelSpec] | {"weights": hexed})
    with pytest.raises(SpecError, match=r"Adapter\.digest.*adapter_fingerprint\(path\)"):
        Adapter("x", hexed)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"KVLayout\.dtype must be KVDtype, got str; use KVDtype\.of"):
        KVLayout("split", 2, LAYOUT.parts, "bf16")  # type: ignore[arg-type]
    assert ModelSpec(b"w" * 32, [TWO]) == ModelSpec(b"w" * 32, (TWO,))  # type: ignore[arg-type]


def test_differences_are_told_by_field() -> None:
    one = ModelSpec(b"w" * 32, (TWO,), name="same")
    for change, told in {
        "weights": ({"weights": b"v" * 32}, "weights: 7777777777777777..., 7676767676767676..."),
        "adapter": ({"adapter": Adapter("x", b"a" * 32)}, "adapter: None, 6161616161616161..."),
        "tp": ({"tp_rank": 1, "tp_size": 2}, "tp_rank: 0, 1; tp_size: 1, 2"),
        "numerics": ({"numerics": b"n"}, "numerics: none, 6e"),
    }.values():
        assert one.differences(dataclasses.replace(one, **change)) == told
    narrow = dataclasses.replace(LAYOUT, dtype=KVDtype.BF16)
    other = dataclasses.replace(one, groups=(LayerGroup((0,), LAYOUT, ROPE), LayerGroup((1,), narrow, ROPE)))
    assert one.differences(other) == "layer 1 layout.dtype: fp32, bf16"
    assert (
        one.differences(dataclasses.replace(one, groups=(LayerGroup((0,), LAYOUT, ROPE),))) == "layers: 2, 1"
    )
    assert one.differences(dataclasses.replace(one, name="another name")) == ""


def test_what_users_name_is_exported() -> None:
    import hypercache

    assert hypercache.KVDtype is KVDtype and hypercache.ModelSpec is ModelSpec
    assert all(getattr(hypercache, name) is not None for name in hypercache.__all__)
