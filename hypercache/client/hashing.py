"""What a client derives from tokens: prompts, and the keyed names by which blocks are found anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hypercache import fingerprint, protocol
from hypercache.client.plan import Fingerprints, Segment, allowed
from hypercache.client.results import Match, Prompt
from hypercache.errors import SpecError
from hypercache.keys import (
    MediaSpan,
    Namespace,
    TenantKey,
    canonical_tokens,
    causal_digests,
    modular_digests,
)

T = TypeVar("T")

ASIDE = 1 << 16  # tokens; hashing more takes longer than others on the loop should wait
SPENT = "deadline: hashing the prompt took all of it; hash once with Client.prompt"


async def aside(tokens: int, work: Callable[[], T]) -> T:
    """``work`` over so many tokens: in a thread if there are many, else here and now."""
    return await asyncio.to_thread(work) if tokens > ASIDE else work()


class Hasher:
    """The hashing of one namespace under its tenant's key."""

    def __init__(self, namespace: Namespace, tenant: TenantKey) -> None:
        self.namespace = namespace
        self.block_size = namespace.block_size
        self._tenant = tenant

    def prompt(self, tokens: Any, media: Sequence[MediaSpan] = ()) -> Prompt:
        """Keeps a copy of the tokens: what is hashed of them later must be of the same."""
        ids = canonical_tokens(tokens).copy()
        ids.flags.writeable = False
        digests = causal_digests(self.namespace, self._tenant, ids, media=media)
        return Prompt(len(ids), self.block_size, tuple(digests), ids, tuple(media))

    def hashed(self, prompt: Any) -> Prompt:
        """Of tokens, a Prompt or a Match. Raises SpecError for another block size."""
        if isinstance(prompt, Match):
            prompt = prompt.prompt
        if not isinstance(prompt, Prompt):
            return self.prompt(prompt)
        if prompt.block_size != self.block_size:
            raise SpecError(
                f"the prompt was hashed in blocks of {prompt.block_size}, the client has {self.block_size}"
            )
        return prompt

    def marks(self, prompt: Prompt, first: int) -> list[bytes]:
        """By which a prompt's blocks can be found out of context, from block ``first`` on."""
        if prompt.ids is None:
            return []
        if prompt.media:  # their places count from the first token that is hashed
            return fingerprint.marks(self.namespace, self._tenant, prompt.ids, media=prompt.media)[first:]
        return fingerprint.marks(self.namespace, self._tenant, prompt.ids[first * self.block_size :])

    def windows(self, prompt: Prompt, first: int, segments: Sequence[Segment] | None) -> Fingerprints:
        """Fingerprints to look for from token ``first`` on, as many as one request may have.

        Never one with the last token in it: that is left to compute. Nor one with media in it, for its tokens
        do not say what it is. Nor any across the border of a segment.
        """
        if prompt.ids is None:
            return np.empty(0, np.uint64)
        stop = min(prompt.tokens - 1, first + protocol.MAX_PROBES + self.block_size - 1)
        asked = fingerprint.fingerprints(self.namespace, self._tenant, prompt.ids[first : max(first, stop)])
        fixed = [(span.start, span.stop) for span in prompt.media]
        inside = allowed(first, len(asked), self.block_size, segments, fixed)
        if inside is not None:
            asked[~inside] = fingerprint.NOT_ASKED
        return asked

    def modular(self, prompt: Prompt, start: int, stop: int) -> list[bytes]:
        """Modular digests of the blocks of tokens ``start..stop``, without media in them."""
        assert prompt.ids is not None
        return modular_digests(self.namespace, self._tenant, prompt.ids[start:stop])
