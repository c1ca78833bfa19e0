"""The helm that the tests share is removed at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helm.chart import helm


@pytest.fixture(scope="session", autouse=True)
def _helm_is_removed() -> Iterator[None]:
    yield
    if helm.cache_info().currsize:
        shutil.rmtree(Path(helm()).parents[1])
