"""Adapters that let inference engines hand their K/V to the cache and take it back."""

from __future__ import annotations

from collections.abc import Callable

LayerReady = Callable[[int], object]
"""Called before layer ``i`` reads the past's K/V: waits for them, raises if they will never be in place."""
