"""Selective recompute: repairs K/V of another context by computing a share of them anew."""

from __future__ import annotations

from hypercache.blend.engine import Layered, check, rehearse, run
from hypercache.blend.flops import Shape
from hypercache.blend.plan import Blend, Blended, Report, Reused
from hypercache.blend.policies import POLICIES, Policy, Seen

__all__ = [
    "POLICIES",
    "Blend",
    "Blended",
    "Layered",
    "Policy",
    "Report",
    "Reused",
    "Seen",
    "Shape",
    "check",
    "rehearse",
    "run",
]
