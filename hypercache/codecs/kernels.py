"""The numba kernels of the codecs, all in this one file.

One file, because numba's on-disk cache notices a change of the file that holds a kernel, but not of a
file that the kernel calls into.

Kernels take addresses (int64) and byte strides, never arrays: one compiled version serves every dtype,
stride, alignment and read-only flag, and a call costs a few microseconds. Callers validate first
(:func:`hypercache.codecs.base.check_shapes`) and keep the memory alive during the call. The GIL is
released. Nothing here uses fast-math: NaN and signed zero matter.

Each row (one token of one head and part) passes through a float32 scratch row that stays in the L1
cache: widen -> (tame) -> (rotate) -> quantise, and back, where keys that move to another position are
turned on the way. All inner loops run over contiguous memory with no branch, so that LLVM vectorises them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types
from numba.extending import intrinsic

BF16, FP16, FP32 = 0, 1, 2  # ``kind`` of an engine buffer

Ints = tuple[int, ...]

_U32 = np.uint32
_F32 = np.float32
_INF = np.uint32(0x7F800000)
_ABS = np.uint32(0x7FFFFFFF)
_FP16_MAX = np.float32(65504.0)
_TINY = np.float32(2.0**-24)  # smallest positive fp16: the least scale of a row that is not all zero
_MAGIC = np.float32(1.5 * 2.0**23)  # adding it rounds to the nearest even integer, left in the low bits


def _kernel(function: Callable[..., Any]) -> Any:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no directory for the cache is writable: compile in every process instead
        return numba.njit(nogil=True)(function)


_inline = numba.njit(inline="always")  # becomes part of the kernel, constants included


@intrinsic
def _ptr(typingctx: Any, address: Any) -> Any:
    """int64 address -> void pointer, for ``carray``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


def _bitcast(source: Any, result: Any) -> Any:
    def typed(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(result))

        return result(source), codegen

    return intrinsic(typed)


_f32 = _bitcast(types.uint32, types.float32)  # bits -> value
_u32 = _bitcast(types.float32, types.uint32)  # value -> bits


_WIDTH = 16  # float32 per register in the transform


@intrinsic(prefer_literal=True)
def _hadamard_f32(typingctx: Any, address: Any, size: Any) -> Any:
    """Unnormalised Walsh-Hadamard transform, in place, of ``size`` (a literal power of two) float32.

    Written as LLVM vector code, because butterflies closer than one register do not vectorise from loops.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), _WIDTH)
        base = builder.inttoptr(args[0], ir.FloatType().as_pointer())
        places = [
            builder.bitcast(builder.gep(base, [ir.Constant(ir.IntType(64), i)]), vector.as_pointer())
            for i in range(0, elements, _WIDTH)
        ]
        x = [builder.load(place, align=4) for place in places]
        step = 1
        while step < _WIDTH:  # within a register
            mirror = ir.Constant(ir.VectorType(ir.IntType(32), _WIDTH), [i ^ step for i in range(_WIDTH)])
            signs = ir.Constant(vector, [-1.0 if i & step else 1.0 for i in range(_WIDTH)])
            for r, value in enumerate(x):  # the product is exact: an FMA gives the same result, only faster
                flipped = builder.fmul(value, signs, flags=("contract",))
                x[r] = builder.fadd(
                    builder.shuffle_vector(value, value, mirror), flipped, flags=("contract",)
                )
            step *= 2
        step = 1
        while step < len(x):  # between registers
            for r in range(len(x)):
                if not r & step:
                    a, b = x[r], x[r + step]
                    x[r], x[r + step] = builder.fadd(a, b), builder.fsub(a, b)
            step *= 2
        for place, value in zip(places, x, strict=True):
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    if not isinstance(size, types.Literal):
        return None
    elements = size.literal_value
    return types.void(types.int64, size), codegen


@intrinsic
def _unpack(typingctx: Any, codes: Any, low: Any, high: Any) -> Any:
    """32 bytes of two signed nibbles each -> 32 int8 at ``low`` and 32 at ``high``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(8), 32)
        four = ir.Constant(vector, [4] * 32)
        source, low, high = (builder.inttoptr(arg, vector.as_pointer()) for arg in args)
        packed = builder.load(source, align=1)
        builder.store(builder.ashr(builder.shl(packed, four), four), low, align=1)
        builder.store(builder.ashr(packed, four), high, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


_LANES = 16  # float32 per step of the turn


def _turn_lanes(interleaved: bool) -> Any:
    """A step of :func:`_turn`: ``_LANES`` pairs as two halves, or half as many as neighbours.

    x, y -> x cos - y sin, y cos + x sin, without an FMA: the same bits on every machine.
    """

    def typed(typingctx: Any, low: Any, high: Any, cos: Any, sin: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = ir.VectorType(ir.FloatType(), _LANES)
            angles = ir.VectorType(ir.FloatType(), _LANES // 2 if interleaved else _LANES)
            low, high = (builder.inttoptr(arg, vector.as_pointer()) for arg in args[:2])
            c, s = (builder.load(builder.inttoptr(arg, angles.as_pointer()), align=4) for arg in args[2:])
            x, y = builder.load(low, align=4), builder.load(high, align=4)
            if interleaved:
                index = ir.VectorType(ir.IntType(32), _LANES)
                twice = ir.Constant(index, [i // 2 for i in range(_LANES)])
                c, s = (builder.shuffle_vector(each, each, twice) for each in (c, s))
                y = builder.shuffle_vector(x, x, ir.Constant(index, [i ^ 1 for i in range(_LANES)]))
                signs = ir.Constant(vector, [1.0 if i & 1 else -1.0 for i in range(_LANES)])
                turned = builder.fadd(builder.fmul(x, c), builder.fmul(builder.fmul(y, signs), s))
                builder.store(turned, low, align=4)
            else:
                builder.store(builder.fsub(builder.fmul(x, c), builder.fmul(y, s)), low, align=4)
                builder.store(builder.fadd(builder.fmul(y, c), builder.fmul(x, s)), high, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), codegen

    return intrinsic(typed)


_turn_halves = _turn_lanes(False)
_turn_neighbours = _turn_lanes(True)


@_inline
def _turn(row: int, cos: int, sin: int, pairs: int, interleaved: int) -> None:
    """Turn the first ``pairs`` pairs of a float32 row, in place, by angles whose cos and sin lie there.

    Pairs are ``(i, i + pairs)``, or ``(2i, 2i + 1)`` if ``interleaved``.
    """
    step = _LANES // 2 if interleaved else _LANES
    whole = pairs - pairs % step
    if interleaved:
        for i in range(0, whole, step):
            _turn_neighbours(row + 8 * i, row + 8 * i, cos + 4 * i, sin + 4 * i)
    else:
        for i in range(0, whole, step):
            _turn_halves(row + 4 * i, row + 4 * (pairs + i), cos + 4 * i, sin + 4 * i)
    x = carray(_ptr(row), (2 * pairs,), np.float32)
    c = carray(_ptr(cos), (pairs,), np.float32)
    s = carray(_ptr(sin), (pairs,), np.float32)
    for i in range(whole, pairs):
        low, high = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        a, b = x[low], x[high]
        x[low], x[high] = a * c[i] - b * s[i], b * c[i] + a * s[i]


@_inline
def _rotate_f32(row: int, dim: int, block: int) -> None:
    """Unnormalised transform, in place, of each ``block`` (a power of two that divides dim) of a row."""
    done = 1
    if block >= 128:
        for i in range(0, dim, 128):
            _hadamard_f32(row + 4 * i, 128)
        done = 128
    elif block == 64:
        for i in range(0, dim, 64):
            _hadamard_f32(row + 4 * i, 64)
        done = 64
    elif block >= 16:
        for i in range(0, dim, 16):
            _hadamard_f32(row + 4 * i, 16)
        done = 16
    x = carray(_ptr(row), (dim,), np.float32)
    while done < block:
        for i in range(0, dim, 2 * done):
            for j in range(i, i + done):
                a, b = x[j], x[j + done]
                x[j], x[j + done] = a + b, a - b
        done *= 2


@_inline
def _aligned(address: int) -> int:
    """The next cache line's start: vectors that lie across lines would cost half of the speed."""
    return (address + 63) // 64 * 64


# ---------------------------------------------------------------------------------------- rows


@_inline
def _widen(source: int, kind: int, row: int, dim: int) -> None:
    """bf16, fp16 or fp32 at ``source`` -> float32 at ``row``; exact, NaN and infinities kept."""
    bits = carray(_ptr(row), (dim,), np.uint32)
    if kind == BF16:
        halves = carray(_ptr(source), (dim,), np.uint16)
        for d in range(dim):
            bits[d] = _U32(halves[d]) << _U32(16)
    elif kind == FP16:
        halves = carray(_ptr(source), (dim,), np.uint16)
        for d in range(dim):
            h = _U32(halves[d])
            magnitude = _U32((h & _U32(0x7FFF)) << _U32(13))
            # Moving the exponent by a multiplication gets subnormals right as well.
            finite = _u32(_f32(magnitude) * _F32(2.0**112))
            special = magnitude | _INF
            bits[d] = (special if magnitude >= _U32(0x7C00 << 13) else finite) | (
                (h & _U32(0x8000)) << _U32(16)
            )
    else:
        words = carray(_ptr(source), (dim,), np.uint32)
        for d in range(dim):
            bits[d] = words[d]


@_inline
def _narrow(row: int, target: int, kind: int, dim: int) -> None:
    """float32 at ``row`` -> bf16, fp16 or fp32 at ``target``, to nearest even; fp16 saturates at 65504."""
    bits = carray(_ptr(row), (dim,), np.uint32)
    if kind == BF16:
        halves = carray(_ptr(target), (dim,), np.uint16)
        for d in range(dim):
            b = bits[d]
            halves[d] = np.uint16(_U32(b + _U32(0x7FFF) + ((b >> _U32(16)) & _U32(1))) >> _U32(16))
    elif kind == FP16:
        halves = carray(_ptr(target), (dim,), np.uint16)
        for d in range(dim):
            b = bits[d]
            a = _U32(b & _ABS)
            clamped = min(a, _U32(0x477FE000))  # 65504
            rounded = _U32(
                clamped + _U32(0xFFF) + ((clamped >> _U32(13)) & _U32(1)) - _U32(112 << 23)
            ) >> _U32(13)
            small = _U32(_u32(_f32(a) + _F32(0.5)) - _U32(0x3F000000))
            h = _U32(small) if a < _U32(0x38800000) else _U32(rounded)
            h = _U32(0x7E00) if a > _INF else h
            halves[d] = np.uint16(h | ((b >> _U32(16)) & _U32(0x8000)))
    else:
        words = carray(_ptr(target), (dim,), np.uint32)
        for d in range(dim):
            words[d] = bits[d]


@_inline
def _amax(row: int, dim: int) -> Any:
    """Bits of the largest magnitude of a float32 row; above ``_INF`` if it holds a NaN."""
    bits = carray(_ptr(row), (dim,), np.uint32)
    top = _U32(0)
    for d in range(dim):
        top = max(top, _U32(bits[d] & _ABS))
    return top


@_inline
def _tame(source: int, kind: int, row: int, dim: int, block: int, limit: Any, keep_nan: bool) -> Any:
    """Load a row that holds NaN, an infinity or more than ``limit``; returns the bits of its largest
    magnitude, which are 0 only if nothing but zeros is left.

    Infinities become the largest finite magnitude of the row, what exceeds ``limit`` becomes ``limit``
    (signs kept), NaN becomes 0 or is kept.
    """
    _widen(source, kind, row, dim)
    x = carray(_ptr(row), (dim,), np.float32)
    top = _F32(0.0)
    kept = False
    for d in range(dim):
        if np.isnan(x[d]):
            kept = keep_nan
            x[d] = x[d] if keep_nan else _F32(0.0)
        elif not np.isinf(x[d]):
            top = max(top, abs(x[d]))
    top = min(top, limit)
    _clamp(row, dim, top)
    if block > 1:
        _rotate_f32(row, dim, block)
        _clamp(row, dim, limit * _F32(np.sqrt(block)))
        return _amax(row, dim)
    return max(_u32(top), _U32(1 if kept else 0))


@_inline
def _clamp(row: int, dim: int, limit: Any) -> None:
    """Saturate at +-limit; NaN stays."""
    x = carray(_ptr(row), (dim,), np.float32)
    for d in range(dim):
        if x[d] > limit:
            x[d] = limit
        elif x[d] < -limit:
            x[d] = -limit


@_inline
def _scale_bits(wanted: Any) -> Any:
    """fp16 bits of the smallest fp16 >= ``wanted`` (a positive float32), at least 2**-24, at most 65504."""
    if wanted < _F32(2.0**-14):
        return max(_U32(1), _U32(np.ceil(wanted * _F32(2.0**24))))
    if wanted >= _FP16_MAX:
        return _U32(0x7BFF)
    return _U32(_U32(_u32(wanted) + _U32(0x1FFF) - _U32(112 << 23)) >> _U32(13))


@_inline
def _scale_value(h: Any) -> Any:
    """float32 value of finite, non-negative fp16 bits."""
    if h < _U32(0x400):
        return _F32(h) * _TINY
    return _f32(_U32(_U32(h << _U32(13)) + _U32(112 << 23)))


@_inline
def _all_zero(address: int, nbytes: int) -> Any:
    data = carray(_ptr(address), (nbytes,), np.uint8)
    found = np.uint8(0)
    for i in range(nbytes):
        found |= data[i]
    return found == 0


@_inline
def _clear(address: int, nbytes: int) -> None:
    data = carray(_ptr(address), (nbytes,), np.uint8)
    for i in range(nbytes):
        data[i] = np.uint8(0)


@_inline
def _put_scale(address: int, h: Any) -> None:
    data = carray(_ptr(address), (2,), np.uint8)  # bytes, as the address may be odd
    data[0] = np.uint8(h & _U32(0xFF))
    data[1] = np.uint8(h >> _U32(8))


@_inline
def _get_scale(address: int) -> Any:
    data = carray(_ptr(address), (2,), np.uint8)
    return _U32(_U32(data[0]) | (_U32(data[1]) << _U32(8)))


# ---------------------------------------------------------------------------------------- codes


@_inline
def _put_int8(row: int, inverse: Any, codes: int, dim: int) -> None:
    x = carray(_ptr(row), (dim,), np.float32)
    out = carray(_ptr(codes), (dim,), np.uint8)
    for d in range(dim):
        out[d] = np.uint8(_u32(x[d] * inverse + _MAGIC))


@_inline
def _get_int8(codes: int, scale: Any, row: int, dim: int) -> None:
    x = carray(_ptr(row), (dim,), np.float32)
    data = carray(_ptr(codes), (dim,), np.int8)
    for d in range(dim):
        x[d] = _F32(data[d]) * scale


@_inline
def _put_fp8(row: int, inverse: Any, codes: int, dim: int) -> None:
    x = carray(_ptr(row), (dim,), np.float32)
    out = carray(_ptr(codes), (dim,), np.uint8)
    for d in range(dim):
        b = _u32(x[d] * inverse)
        a = _U32(b & _ABS)
        clamped = min(a, _U32(0x43E00000))  # 448
        rounded = _U32(clamped + _U32(0x7FFFF) + ((clamped >> _U32(20)) & _U32(1)) - _U32(120 << 23)) >> _U32(
            20
        )
        # Below 2**-6 steps are 2**-9, which is the spacing of float32 from 2**14 on.
        small = _U32(_u32(_f32(a) + _F32(2.0**14)) - _U32(0x46800000))
        code = _U32(small) if a < _U32(0x3C800000) else _U32(rounded)
        code = _U32(0x7F) if a > _INF else code
        out[d] = np.uint8(code | (_U32(b >> _U32(24)) & _U32(0x80)))


@_inline
def _get_fp8(codes: int, scale: Any, row: int, dim: int) -> None:
    x = carray(_ptr(row), (dim,), np.float32)
    data = carray(_ptr(codes), (dim,), np.uint8)
    for d in range(dim):
        c = _U32(data[d])
        m = _U32(c & _U32(0x7F))
        small = _u32(_F32(np.int32(m)) * _F32(2.0**-9))
        a = _U32(small) if m < _U32(8) else _U32((m << _U32(20)) + _U32(120 << 23))
        a = _U32(0x7FC00000) if m == _U32(0x7F) else a
        x[d] = _f32(_U32(a | ((c & _U32(0x80)) << _U32(24)))) * scale


@_inline
def _nibble(value: Any) -> Any:
    """Nearest integer of a float32, in -8..7, as the low four bits of the result."""
    return _U32(_u32(value + _MAGIC) & _U32(15))


@_inline
def _put_int4(row: int, inverse: Any, codes: int, dim: int) -> None:
    pairs, half = dim // 2, (dim + 1) // 2
    low = carray(_ptr(row), (half,), np.float32)
    high = carray(_ptr(row + 4 * half), (pairs,), np.float32)
    out = carray(_ptr(codes), (half,), np.uint8)
    for d in range(pairs):
        out[d] = np.uint8(_nibble(low[d] * inverse) | (_nibble(high[d] * inverse) << _U32(4)))
    if half > pairs:
        out[pairs] = np.uint8(_nibble(low[pairs] * inverse))


@_inline
def _get_int4(codes: int, row: int, dim: int) -> None:
    """Signed nibbles -> int8 at ``row``."""
    pairs, half = dim // 2, (dim + 1) // 2
    whole = pairs - pairs % 32
    for d in range(0, whole, 32):
        _unpack(codes + d, row + d, row + half + d)
    low = carray(_ptr(row), (half,), np.int8)
    high = carray(_ptr(row + half), (pairs,), np.int8)
    data = carray(_ptr(codes), (half,), np.uint8)
    for d in range(whole, half):
        low[d] = np.int8(((data[d] & np.uint8(15)) ^ np.uint8(8)) - np.uint8(8))
    for d in range(whole, pairs):
        high[d] = np.int8(((data[d] >> np.uint8(4)) ^ np.uint8(8)) - np.uint8(8))


# ---------------------------------------------------------------------------------------- runs of blocks

INT8, FP8, INT4, RAW = 0, 1, 2, 3  # ``code``; the last has no scales and is for _make_recode alone


def _make_encode(fixed: int) -> Any:
    def encode_rows(how: Ints, shape: Ints, source: Ints, target: Ints) -> None:
        """Encode one part of a run of blocks. Strides and sizes are in bytes.

        how: code (INT8, FP8, INT4), size of the Walsh-Hadamard blocks along dim (1 for none), kind of source.
        shape: heads, blocks, tokens per block, dim.
        source: address of element [0][0][0], stride of heads, stride of tokens.
        target: address of the part's first scale, stride of blocks, stride of heads.
        """
        code, block, kind = how
        heads, blocks, tokens, dim = shape
        source_at, source_head, source_token = source
        target_at, target_block, target_head = target
        if fixed:
            dim = fixed
        nbytes = (dim + 1) // 2 if code == INT4 else dim
        top_code = _F32(127.0) if code == INT8 else (_F32(448.0) if code == FP8 else _F32(7.0))
        limit = top_code * _FP16_MAX
        norm = _F32(1.0 / np.sqrt(block))
        memory = np.empty(4 * tokens * (dim + 2) + 63, np.uint8)
        scratch = _aligned(memory.ctypes.data)
        tops = carray(_ptr(scratch + 4 * dim * tokens), (tokens,), np.uint32)
        inverses = carray(_ptr(scratch + 4 * dim * tokens + 4 * tokens), (tokens,), np.float32)
        for h in range(heads):
            for b in range(blocks):
                first = source_at + h * source_head + b * tokens * source_token
                scales = target_at + b * target_block + h * target_head
                # Pass by pass over the block, so that no row waits for the division of the one before.
                for t in range(tokens):
                    row, address = scratch + 4 * dim * t, first + t * source_token
                    _widen(address, kind, row, dim)
                    if block > 1:
                        _rotate_f32(row, dim, block)
                    tops[t] = _amax(row, dim)
                    if tops[t] > _u32(limit):
                        tops[t] = _tame(address, kind, row, dim, block, limit, code == FP8)
                for t in range(tokens):
                    stored = _scale_bits(_f32(tops[t]) * norm / top_code) if tops[t] > _U32(0) else _U32(0)
                    _put_scale(scales + 2 * t, stored)
                    inverses[t] = norm / _scale_value(stored) if stored > _U32(0) else _F32(0.0)
                for t in range(tokens):
                    row, codes = scratch + 4 * dim * t, scales + 2 * tokens + t * nbytes
                    if code == INT8:
                        _put_int8(row, inverses[t], codes, dim)
                    elif code == FP8:
                        _put_fp8(row, inverses[t], codes, dim)
                    else:
                        _put_int4(row, inverses[t], codes, dim)
                    if tops[t] == _U32(0):  # E4M3 has a -0
                        _clear(codes, nbytes)
        memory[0] = 0  # numba frees an array after its last use

    return _kernel(encode_rows)


def _make_decode(fixed: int) -> Any:
    def decode_rows(how: Ints, shape: Ints, source: Ints, target: Ints, turn: Ints) -> int:
        """The reverse: ``source`` is laid out as ``target`` was.

        turn: address of float32 cos, address of sin, number of pairs (0 to leave rows as they are), 1 if
        pairs are neighbours.
        Returns -1, or ``(head * blocks + block) * tokens + token`` of the first scale that no encoder
        writes: negative (also -0), NaN, infinite, or zero beside codes that are not all zero.
        """
        code, block, kind = how
        heads, blocks, tokens, dim = shape
        source_at, source_block, source_head = source
        target_at, target_head, target_token = target
        cos, sin, pairs, interleaved = turn
        if fixed:
            dim = fixed
        nbytes = (dim + 1) // 2 if code == INT4 else dim
        norm = _F32(1.0 / np.sqrt(block))
        memory = np.empty(5 * dim + 63, np.uint8)
        scratch = _aligned(memory.ctypes.data)
        nibbles = scratch + 4 * dim
        for h in range(heads):
            for b in range(blocks):
                first = target_at + h * target_head + b * tokens * target_token
                scales = source_at + b * source_block + h * source_head
                for t in range(tokens):
                    codes = scales + 2 * tokens + t * nbytes
                    stored = _get_scale(scales + 2 * t)
                    if stored >= _U32(0x7C00) or (stored == _U32(0) and not _all_zero(codes, nbytes)):
                        return (h * blocks + b) * tokens + t
                    scale = _scale_value(stored)
                    if code == INT8:
                        _get_int8(codes, scale, scratch, dim)
                    elif code == FP8:
                        _get_fp8(codes, scale, scratch, dim)
                    else:
                        _get_int4(codes, nibbles, dim)
                        _get_int8(nibbles, scale * norm, scratch, dim)
                        if block > 1:
                            _rotate_f32(scratch, dim, block)
                    if pairs > 0:
                        _turn(scratch, cos, sin, pairs, interleaved)
                    _narrow(scratch, first + t * target_token, kind, dim)
        memory[0] = 0  # numba frees an array after its last use
        return -1

    return _kernel(decode_rows)


@_inline
def _code_nbytes(code: int, kind: int, dim: int) -> Any:
    """Bytes of a row's codes."""
    if code == INT4:
        return (dim + 1) // 2
    if code == RAW:
        return dim * (4 if kind == FP32 else 2)
    return dim


@_inline
def _round(row: int, memory: int, kind: int, dim: int) -> None:
    """Round a float32 row as :func:`_narrow` does, by way of ``memory`` for a row of ``kind``."""
    if kind == BF16:
        bits = carray(_ptr(row), (dim,), np.uint32)
        for d in range(dim):
            b = bits[d]
            bits[d] = _U32(b + _U32(0x7FFF) + ((b >> _U32(16)) & _U32(1))) & _U32(0xFFFF0000)
    elif kind == FP16:
        _narrow(row, memory, kind, dim)
        _widen(memory, kind, row, dim)


@_inline
def _load(
    codes: int, code: int, scale: Any, norm: Any, block: int, nibbles: int, kind: int, row: int, dim: int
) -> None:
    """A row of codes -> float32."""
    if code == RAW:
        _widen(codes, kind, row, dim)
    elif code == INT8:
        _get_int8(codes, scale, row, dim)
    elif code == FP8:
        _get_fp8(codes, scale, row, dim)
    else:
        _get_int4(codes, nibbles, dim)
        _get_int8(nibbles, scale * norm, row, dim)
        if block > 1:
            _rotate_f32(row, dim, block)


def _make_recode(fixed: int) -> Any:
    def recode_rows(how: Ints, shape: Ints, source: Ints, target: Ints) -> int:
        """From one code to another in one pass: what ``decode_rows`` to elements of ``kind`` and
        ``encode_rows`` from there give, bit for bit.

        how: code and size of the Walsh-Hadamard blocks of the source, both of the target, kind.
        shape: heads, blocks, tokens per block, dim.
        source, target: address of the part's first scale, stride of blocks, stride of heads.
        Returns what ``decode_rows`` does.
        """
        code, block, to_code, to_block, kind = how
        heads, blocks, tokens, dim = shape
        source_at, source_block, source_head = source
        target_at, target_block, target_head = target
        if fixed:
            dim = fixed
        nbytes, to_nbytes = _code_nbytes(code, kind, dim), _code_nbytes(to_code, kind, dim)
        norm, to_norm = _F32(1.0 / np.sqrt(block)), _F32(1.0 / np.sqrt(to_block))
        top_code = _F32(127.0) if to_code == INT8 else (_F32(448.0) if to_code == FP8 else _F32(7.0))
        limit = top_code * _FP16_MAX
        memory = np.empty(4 * tokens * (dim + 2) + 9 * dim + 63, np.uint8)
        scratch = _aligned(memory.ctypes.data)
        kept = scratch + 4 * tokens * dim  # a row as the engine has it
        tops = carray(_ptr(kept + 4 * dim), (tokens,), np.uint32)
        inverses = carray(_ptr(kept + 4 * dim + 4 * tokens), (tokens,), np.float32)
        nibbles = kept + 4 * dim + 8 * tokens
        for h in range(heads):
            for b in range(blocks):
                scales = source_at + b * source_block + h * source_head
                to_scales = target_at + b * target_block + h * target_head
                for t in range(tokens):
                    row, codes = scratch + 4 * dim * t, scales + t * nbytes
                    scale = _F32(0.0)
                    if code != RAW:
                        codes += 2 * tokens
                        stored = _get_scale(scales + 2 * t)
                        if stored >= _U32(0x7C00) or (stored == _U32(0) and not _all_zero(codes, nbytes)):
                            return (h * blocks + b) * tokens + t
                        scale = _scale_value(stored)
                    _load(codes, code, scale, norm, block, nibbles, kind, row, dim)
                    if to_code == RAW:
                        _narrow(row, to_scales + t * to_nbytes, kind, dim)
                        continue
                    if code != RAW:
                        _round(row, kept, kind, dim)
                    if to_block > 1:
                        _rotate_f32(row, dim, to_block)
                    tops[t] = _amax(row, dim)
                    if tops[t] > _u32(limit):
                        if code != RAW:
                            _load(codes, code, scale, norm, block, nibbles, kind, row, dim)
                            _narrow(row, kept, kind, dim)
                            codes = kept
                        tops[t] = _tame(codes, kind, row, dim, to_block, limit, to_code == FP8)
                if to_code == RAW:
                    continue
                for t in range(tokens):
                    top = _f32(tops[t]) * to_norm / top_code
                    stored = _scale_bits(top) if tops[t] > _U32(0) else _U32(0)
                    _put_scale(to_scales + 2 * t, stored)
                    inverses[t] = to_norm / _scale_value(stored) if stored > _U32(0) else _F32(0.0)
                for t in range(tokens):
                    row, codes = scratch + 4 * dim * t, to_scales + 2 * tokens + t * to_nbytes
                    if to_code == INT8:
                        _put_int8(row, inverses[t], codes, dim)
                    elif to_code == FP8:
                        _put_fp8(row, inverses[t], codes, dim)
                    else:
                        _put_int4(row, inverses[t], codes, dim)
                    if tops[t] == _U32(0):  # E4M3 has a -0
                        _clear(codes, to_nbytes)
        memory[0] = 0  # numba frees an array after its last use
        return -1

    return _kernel(recode_rows)


@_kernel
def copy_rows(shape: Ints, source: Ints, target: Ints) -> None:
    """Copy ``shape`` = (heads, blocks, tokens, bytes of a row) between two places.

    source, target: address, stride of heads, of blocks, of tokens. NumPy copies such views at half the speed.
    """
    heads, blocks, tokens, nbytes = shape
    source_at, source_head, source_block, source_token = source
    target_at, target_head, target_block, target_token = target
    if source_token == nbytes and target_token == nbytes:
        tokens, nbytes = 1, tokens * nbytes
    for h in range(heads):
        for b in range(blocks):
            for t in range(tokens):
                first = source_at + h * source_head + b * source_block + t * source_token
                data = carray(_ptr(first), (nbytes,), np.uint8)
                first = target_at + h * target_head + b * target_block + t * target_token
                out = carray(_ptr(first), (nbytes,), np.uint8)
                for i in range(nbytes):
                    out[i] = data[i]


def _make_turn(fixed: int) -> Any:
    def turn_rows(kind: int, shape: Ints, source: Ints, target: Ints, turn: Ints) -> None:
        """Copy rows of ``kind`` as :func:`copy_rows` does, turning the first 2 * pairs elements of each.

        shape: heads, blocks, tokens, bytes of a row. source and target may be one place, but not overlap.
        """
        heads, blocks, tokens, nbytes = shape
        source_at, source_head, source_block, source_token = source
        target_at, target_head, target_block, target_token = target
        cos, sin, pairs, interleaved = turn
        if fixed:
            pairs = fixed // 2
        memory = np.empty(8 * pairs + 63, np.uint8)
        scratch = _aligned(memory.ctypes.data)
        turned = 2 * pairs * (4 if kind == FP32 else 2)
        for h in range(heads):
            for b in range(blocks):
                for t in range(tokens):
                    first = source_at + h * source_head + b * source_block + t * source_token
                    place = target_at + h * target_head + b * target_block + t * target_token
                    _widen(first, kind, scratch, 2 * pairs)
                    _turn(scratch, cos, sin, pairs, interleaved)
                    _narrow(scratch, place, kind, 2 * pairs)
                    data = carray(_ptr(first + turned), (nbytes - turned,), np.uint8)
                    out = carray(_ptr(place + turned), (nbytes - turned,), np.uint8)
                    for i in range(nbytes - turned):
                        out[i] = data[i]
        memory[0] = 0  # numba frees an array after its last use

    return _kernel(turn_rows)


# The usual head dims have kernels of their own: with a constant trip count LLVM unrolls the row loops
# completely. Each is compiled when first used.
FIXED = (64, 128)
_ENCODE = {dim: _make_encode(dim) for dim in (0, *FIXED)}
_DECODE = {dim: _make_decode(dim) for dim in (0, *FIXED)}
_TURN = {dim: _make_turn(dim) for dim in (0, *FIXED)}
_RECODE = {dim: _make_recode(dim) for dim in (0, *FIXED)}


def encoder(dim: int) -> Any:
    """The ``encode_rows`` to use for rows of ``dim`` elements."""
    return _ENCODE[dim if dim in FIXED else 0]


def decoder(dim: int) -> Any:
    """The ``decode_rows`` to use for rows of ``dim`` elements."""
    return _DECODE[dim if dim in FIXED else 0]


def turner(rotary_dim: int) -> Any:
    """The ``turn_rows`` to use where the first ``rotary_dim`` elements of a row are rotated."""
    return _TURN[rotary_dim if rotary_dim in FIXED else 0]


def recoder(dim: int) -> Any:
    """The ``recode_rows`` to use for rows of ``dim`` elements."""
    return _RECODE[dim if dim in FIXED else 0]
