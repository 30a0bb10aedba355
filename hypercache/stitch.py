"""Putting K/V where they were not computed: what a fetch out of context does, for K/V that are at hand."""

from __future__ import annotations

from hypercache import rope
from hypercache.errors import SpecError
from hypercache.kv import KVBuffers


def put(source: KVBuffers, at: int, target: KVBuffers, to: int, tokens: int, *, turned: bool = True) -> None:
    """Copy ``tokens`` tokens from ``at`` of ``source`` to ``to`` of ``target``, keys turned to that place.

    turned: False leaves keys as they are (naive stitching). Both belong to one model. ``target.exact`` stays
    as it is: whoever blends or stores says how far its K/V are exact.
    """
    parts, old = target.window(to, to + tokens), source.window(at, at + tokens)
    for group in target.spec.groups:
        turn = rope.turn(group.rope, to - at) if turned else None
        for layer in group.layers:
            for new, part in zip(parts.layer(layer), old.layer(layer), strict=True):
                new[:] = part
            rope.rerotate(target.spec.layout(layer), parts.layer(layer), turn)


def copied(kv: KVBuffers, tokens: int | None = None) -> KVBuffers:
    """The same K/V in memory of its own, with room for ``tokens`` (None: as many); SpecError for less."""
    room = kv.tokens if tokens is None else tokens
    if room < kv.tokens:
        raise SpecError(f"no room for {kv.tokens} tokens in {room}")
    out = KVBuffers.allocate(kv.spec, room)
    put(kv, 0, out, 0, kv.tokens)
    return out
