"""What the tests that kill processes have measured, on its way to the end of pytest's report."""

from __future__ import annotations

import pytest

DEATHS: pytest.StashKey[list[tuple[str, ...]]] = pytest.StashKey()
