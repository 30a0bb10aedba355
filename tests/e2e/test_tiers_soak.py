"""The short form of ``make soak``."""

from __future__ import annotations

from pathlib import Path

from .soak_tiers import soak


async def test_clients_that_do_everything_at_random_leave_nothing(tmp_path: Path) -> None:
    """D01, L01, L09 with a disk: no wrong byte, no fault, and all that was held is returned."""
    done = await soak(tmp_path, 5.0)
    assert done["blocks fetched"] > 100 and done["promoted_total"] > 20
    assert done["evicted_total"] + done["cooled_total"] > 100 and done["cancel"] > 10
