"""What a client tells of the next use of stored blocks, and what it wants kept."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

from hypercache import protocol
from hypercache.client.link import why
from hypercache.client.results import HintResult, PinResult, Prompt, UnpinResult
from hypercache.errors import ConfigError

NOTHING = "below block size"
MAX_PIN_S = 366 * 86400  # more than any server grants

Ask = Callable[[protocol.Message], Awaitable[protocol.Message | str]]
Tell = Callable[..., protocol.Hint]  # a HINT, given handle and digests


def use(steps: int | None, priority: int) -> Tell:
    """HINTs of the next use. Raises ConfigError for values out of range."""
    least, most = -protocol.MAX_PRIORITY, protocol.MAX_PRIORITY
    if steps is not None and not _integer(steps, 0, protocol.MAX_STEPS):
        raise ConfigError(f"steps={steps!r} must be a whole number, 0..{protocol.MAX_STEPS}, or None")
    if not _integer(priority, least, most):
        raise ConfigError(f"priority={priority!r} must be a whole number, {least}..{most}")
    return partial(protocol.Hint, steps=-1 if steps is None else int(steps), priority=int(priority))


def keep(seconds: float) -> Tell:
    """HINTs that pin. Raises ConfigError unless ``seconds`` is a number above 0 and finite."""
    number = isinstance(seconds, int | float | np.integer | np.floating) and not isinstance(seconds, bool)
    if not number or not 0 < seconds < math.inf:
        raise ConfigError(f"seconds={seconds!r} must be a number, above 0 and finite; unpin ends a pin")
    return partial(protocol.Hint, pin_ms=math.ceil(min(seconds, MAX_PIN_S) * 1000))


async def hint(ask: Ask, handle: int, hashed: Prompt, tell: Tell) -> HintResult:
    """Tell of all blocks, in as many requests as that takes."""
    digests, told = hashed.digests, 0
    while told < len(digests):
        some = digests[told : told + protocol.MAX_HINT_BLOCKS]
        answer = await _ask(ask, tell(handle, protocol.join_digests(some)))
        if isinstance(answer, str):
            return HintResult(told, answer)
        told += min(answer.blocks, len(some))
        if answer.blocks < len(some):
            return HintResult(told, "not stored beyond this" if told else "not stored")
    return HintResult(told, "" if told else NOTHING)


async def pin(ask: Ask, handle: int, hashed: Prompt, tell: Tell) -> PinResult:
    digests = hashed.digests[: protocol.MAX_BLOCKS]
    if not digests:
        return PinResult(0, 0.0, 0, NOTHING)
    answer = await _ask(ask, tell(handle, protocol.join_digests(digests)))
    if isinstance(answer, str):
        return PinResult(0, 0.0, 0, answer)
    stored = min(answer.blocks, len(digests))
    pinned = min(answer.pinned, stored)
    if pinned < stored:
        reason = "the server has no more room for pins (pin_share), or none for yours"
    elif stored < len(digests):
        reason = "not stored beyond this" if stored else "not stored"
    else:
        reason = ""
    return PinResult(pinned, answer.pin_ms / 1000 if pinned else 0.0, stored, reason)


async def unpin(ask: Ask, handle: int, hashed: Prompt) -> UnpinResult:
    digests = hashed.digests[: protocol.MAX_BLOCKS]
    if not digests:
        return UnpinResult(0, NOTHING)
    answer = await _ask(ask, protocol.Hint(handle, protocol.join_digests(digests), pin_ms=-1))
    return UnpinResult(0, answer) if isinstance(answer, str) else UnpinResult(answer.pinned)


async def _ask(ask: Ask, question: protocol.Hint) -> protocol.Hinted | str:
    answer = await ask(question)
    if not isinstance(answer, protocol.Hinted):
        return why(answer)
    return protocol.Hinted(*(max(0, n) for n in (answer.blocks, answer.pinned, answer.pin_ms)))


def _integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(low <= value <= high)
