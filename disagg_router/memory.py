"""How often Python's garbage collector goes through everything a router holds."""

from __future__ import annotations

import gc

GC_THRESHOLDS = 10_000, 20, 1000


def spare_collections() -> None:
    """Nearly everything here goes by its reference count. A whole collection walks a prefix index of a million blocks,
    which takes about a second of every stream: it comes a thousand times more seldom than Python would have it."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
