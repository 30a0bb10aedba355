"""Host K/V buffers: zero copy, and every disagreement refused by name before a byte moves (class J)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hypercache.errors import SpecError
from hypercache.kv import KVBuffers
from hypercache.model import KVDtype, KVLayout, LayerGroup, ModelSpec, Part, RopeSpec

ROPE = RopeSpec("default", 10000.0, 8)


def layout(
    heads: int = 2, k: int = 8, v: int = 8, dtype: KVDtype = KVDtype.FP32, kind: str = "split"
) -> KVLayout:
    names = ("k", "v") if kind == "split" else ("latent", "rope")
    return KVLayout(kind, heads, (Part(names[0], k), Part(names[1], v)), dtype)


def spec(layers: int = 3, **kwargs: object) -> ModelSpec:
    return ModelSpec(b"w" * 32, (LayerGroup(tuple(range(layers)), layout(**kwargs), ROPE),), name="toy")  # type: ignore[arg-type]


def arrays(model: ModelSpec, tokens: int) -> list[list[np.ndarray]]:
    return [
        [np.zeros((lay.heads, tokens, part.dim), lay.dtype.storage) for part in lay.parts]
        for lay in map(model.layout, range(model.num_layers))
    ]


@pytest.mark.parametrize("dtype", list(KVDtype)[:3])
def test_allocation_is_one_block_of_disjoint_aligned_arrays(dtype: KVDtype) -> None:
    model = spec(layers=3, heads=3, k=9, v=7, dtype=dtype)
    kv = KVBuffers.allocate(model, 17)
    spans = []
    for i in range(3):
        for part, array in zip(model.layout(i).parts, kv.layer(i), strict=True):
            assert array.shape == (3, 17, part.dim) and array.dtype == dtype.storage
            assert array.flags.c_contiguous and array.flags.writeable
            address = array.ctypes.data
            assert address % 64 == 0
            spans.append((address, address + array.nbytes))
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] < kv.nbytes + 64 * len(spans)
    assert kv.nbytes == 17 * model.token_nbytes() == sum(b - a for a, b in spans)


def test_wrap_lends_the_engines_own_memory_with_free_outer_strides() -> None:
    model = spec()
    token_major = [[np.zeros((9, 2, 8), np.float32).transpose(1, 0, 2) for _ in range(2)] for _ in range(3)]
    kv = KVBuffers.wrap(model, token_major)
    kv.layer(1)[0][1, 4, 3] = 7
    assert token_major[1][0][1, 4, 3] == 7
    assert kv.tokens == 9


def test_window_is_a_view_and_clips() -> None:
    kv = KVBuffers.wrap(spec(), arrays(spec(), 10))
    part = kv.window(4, 6)
    part.layer(2)[1][:] = 3
    assert part.tokens == 2
    assert kv.layer(2)[1][:, 4:6].min() == 3 and np.count_nonzero(kv.layer(2)[1]) == 2 * 2 * 8
    for bad in ((-1, 3), (3, 2), (0, 11)):
        with pytest.raises(SpecError, match="outside"):
            kv.window(*bad)


def test_l05_no_tokens_are_a_valid_sequence() -> None:
    kv = KVBuffers.allocate(spec(), 0)
    assert kv.tokens == 0 and kv.nbytes == 0 and kv.layer(0)[0].shape == (2, 0, 8)
    assert KVBuffers.wrap(spec(), arrays(spec(), 0)).tokens == 0
    with pytest.raises(SpecError, match=">= 0"):
        KVBuffers.allocate(spec(), -16)


def test_j01_parts_of_different_width_and_a_single_latent_head() -> None:
    for model in (spec(k=132, v=64), spec(heads=1, k=512, v=64, kind="mla")):
        kv = KVBuffers.wrap(model, arrays(model, 16))
        assert [a.shape[2] for a in kv.layer(0)] == [p.dim for p in model.layout(0).parts]
    model = spec(k=132, v=64)
    swapped = arrays(model, 16)
    swapped[1].reverse()
    with pytest.raises(SpecError, match=r"layer 1, part 'k': dim must be 132, got 64"):
        KVBuffers.wrap(model, swapped)


def test_j02_shapes_alternate_from_layer_to_layer() -> None:
    local, whole = layout(heads=16, k=256, v=256), layout(heads=4, k=512, v=512)
    model = ModelSpec(
        b"w" * 32, (LayerGroup((0, 2), local, ROPE), LayerGroup((1, 3), whole, ROPE)), name="mixed"
    )
    kv = KVBuffers.allocate(model, 3)
    assert [kv.layer(i)[0].shape for i in range(4)] == [(16, 3, 256), (4, 3, 512)] * 2
    wrong = arrays(model, 3)
    wrong[0], wrong[1] = wrong[1], wrong[0]
    with pytest.raises(SpecError, match=r"layer 0, part 'k': heads must be 16, got 4"):
        KVBuffers.wrap(model, wrong)


@pytest.mark.parametrize("layers", [1, 2, 24, 28, 61, 78, 93])
@pytest.mark.parametrize("heads", [1, 2, 8, 40])
def test_j03_any_depth_and_head_count(layers: int, heads: int) -> None:
    model = spec(layers=layers, heads=heads)
    assert KVBuffers.allocate(model, 2).layer(layers - 1)[0].shape == (heads, 2, 8)
    with pytest.raises(SpecError, match=rf"has {layers} layers, the engine handed over {layers + 1}"):
        KVBuffers.wrap(model, arrays(spec(layers=layers + 1, heads=heads), 2))
    with pytest.raises(SpecError, match=rf"0..{layers - 1}, asked for {layers}"):
        KVBuffers.allocate(model, 1).layer(layers)


def test_j04_a_packed_or_transposed_layout_is_refused() -> None:
    packed = [[np.zeros((2, 4, 16), np.float32)] for _ in range(3)]
    with pytest.raises(SpecError, match=r"parts .* got 1 arrays"):
        KVBuffers.wrap(spec(), packed)
    transposed = arrays(spec(), 4)
    transposed[2][1] = np.zeros((2, 8, 4), np.float32).transpose(0, 2, 1)
    with pytest.raises(SpecError, match=r"layer 2, part 'v': elements of one token must be contiguous"):
        KVBuffers.wrap(spec(), transposed)
    batched = arrays(spec(), 4)
    batched[0][0] = batched[0][0][None]
    with pytest.raises(SpecError, match=r"layer 0, part 'k': .*no batch axis"):
        KVBuffers.wrap(spec(), batched)


def test_j05_sizes_and_dtypes_are_compared_before_any_copy() -> None:
    short = arrays(spec(), 16)
    short[1][1] = short[1][1][:, :15]
    with pytest.raises(SpecError, match=r"layer 1, part 'v': tokens must be 16, got 15"):
        KVBuffers.wrap(spec(), short)
    half = arrays(spec(), 16)
    half[2][0] = half[2][0].astype(np.float16)
    with pytest.raises(SpecError, match=r"layer 2, part 'k': fp32 K/V are carried as float32, got float16"):
        KVBuffers.wrap(spec(), half)
    listed: list[list[object]] = [list(parts) for parts in arrays(spec(), 16)]
    listed[0][1] = [[0.0]]
    with pytest.raises(SpecError, match=r"layer 0, part 'v': needs a NumPy array, got list"):
        KVBuffers.wrap(spec(), listed)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["constructor", "wrap"])
def test_every_public_way_checks(way: str) -> None:
    """J04, J05: whatever K/V come in, they are the spec's or refused by name."""

    def make(model: ModelSpec, layers: Any) -> KVBuffers:
        return KVBuffers(model, 16, layers) if way == "constructor" else KVBuffers.wrap(model, layers)

    bf16 = spec(dtype=KVDtype.BF16)
    assert make(bf16, arrays(bf16, 16)).layer(2)[0].dtype == np.uint16
    swapped = [[array.swapaxes(0, 1) for array in parts] for parts in arrays(bf16, 16)]
    for layers, message in (
        (arrays(spec(), 16), "bf16 K/V are carried as uint16, got float32"),
        (swapped, r"layer 0, part 'k': \w+ must be"),
        (arrays(bf16, 16)[:2], "has 3 layers, the engine handed over 2"),
        (None, "layers must be list or tuple, got NoneType"),
        ([None] * 3, "layer 0 must be list or tuple, got NoneType"),
        ([[None, None]] * 3, "layer 0, part 'k': needs a NumPy array, got NoneType"),
        (np.zeros((3, 2, 2, 16, 8), np.uint16), "layers must be list or tuple, got ndarray"),
    ):
        with pytest.raises(SpecError, match=message):
            make(bf16, layers)
    with pytest.raises(SpecError, match="spec must be ModelSpec, got dict"):
        make({}, arrays(bf16, 16))  # type: ignore[arg-type]


def test_the_constructor_and_allocate_check_their_count_of_tokens() -> None:
    with pytest.raises(SpecError, match="tokens must be 15, got 16"):
        KVBuffers(spec(), 15, arrays(spec(), 16))
    for tokens in (-1, 1.5, "16", None, True):
        with pytest.raises(SpecError, match="tokens must be an integer >= 0"):
            KVBuffers(spec(), tokens, arrays(spec(), 16))  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="tokens must be an integer >= 0"):
            KVBuffers.allocate(spec(), tokens)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="spec must be ModelSpec, got str"):
        KVBuffers.allocate("toy", 16)  # type: ignore[arg-type]


def test_exact_is_one_fact_for_all_windows_of_a_memory() -> None:
    kv = KVBuffers.allocate(spec(), 100)
    head, tail = kv.window(0, 60), kv.window(40, 100)
    assert (kv.exact, head.exact, tail.exact) == (100, 60, 60)
    head.mark_approximate(50)
    assert (kv.exact, head.exact, tail.exact) == (50, 50, 10)
    assert kv.window(10, 30).exact == 20 and kv.window(70, 90).exact == 0
    tail.mark_approximate(5)
    assert (kv.exact, head.exact, tail.exact) == (45, 45, 5)
    head.mark_approximate(55)  # there is none further in front
    assert kv.exact == 45
    head.mark_exact(30)
    assert kv.exact == 45
    kv.window(70, 90).mark_exact(20)  # behind approximate ones nothing is exact
    assert kv.exact == 45
    tail.mark_exact(20)
    assert (kv.exact, head.exact, tail.exact) == (60, 60, 20)
    kv.mark_exact(100)
    assert (kv.exact, head.exact, tail.exact) == (100, 60, 60)


def test_what_arrives_makes_exact_what_nothing_approximate_came_to_since() -> None:
    kv = KVBuffers.allocate(spec(), 100)
    kv.mark_approximate(20)
    alone = kv.arriving(100, None)
    alone.placed(64)
    alone.over()
    assert kv.exact == 64

    kv.mark_approximate(20)
    plain = kv.arriving(100, None)
    kv.window(40, 100).mark_approximate(10)  # written while it was on its way
    plain.placed(64)
    plain.over()
    assert kv.exact == 50

    kv.mark_exact(100)
    moved = kv.window(40, 100).arriving(60, 30)
    assert kv.exact == 70 and kv.window(0, 60).exact == 60
    kv.mark_exact(100)
    assert kv.exact == 70  # until nothing more comes
    kv.mark_approximate(20)
    plain = kv.arriving(100, None)
    plain.placed(90)  # what is still under way may overwrite it
    moved.over()
    assert kv.exact == 70
    plain.over()
    mixed = kv.arriving(100, 80)
    assert kv.exact == 70
    mixed.placed(75)
    mixed.over()
    assert kv.exact == 75


@pytest.mark.parametrize("wrong", [-1, 101, 1.5, "all", True])
def test_what_is_exact_must_be_a_count_of_its_tokens(wrong: object) -> None:
    with pytest.raises(SpecError, match="mark_exact"):
        KVBuffers.allocate(spec(), 100).mark_exact(wrong)  # type: ignore[arg-type]
