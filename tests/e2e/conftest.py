"""Engines are dear (1.1 GB and 20 s each): one prefill and one decode serve every test that does not kill `serve`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deaths import DEATHS
from tests.e2e.serving import ROOT, Serving, local_cpu_config, nothing_left_of, start


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    running: list[Serving] = []
    yield running
    for one in running:
        if one.process.poll() is None:
            with nothing_left_of(one.cluster):
                assert one.stop() == 0, one.stderr()[-4000:]


@pytest.fixture
def cluster(_shared: list[Serving], tmp_path_factory: pytest.TempPathFactory) -> Serving:
    """The running example; started when it is not running, since a test before may have killed it."""
    if not _shared or _shared[-1].process.poll() is not None:
        _shared.append(start(tmp_path_factory.mktemp("serving"), local_cpu_config()))
    _shared[-1].until_tested()
    return _shared[-1]


@pytest.fixture(scope="session", autouse=True)
def _model() -> Path:
    if not (ROOT / "model" / "config.json").is_file():
        pytest.fail("there is no model in ./model: run `make setup`")
    return ROOT / "model"


@pytest.fixture
def death_table(pytestconfig: pytest.Config) -> list[tuple[str, ...]]:
    """Rows of (killed, of, gone after s, back after s); shown at the end of the run."""
    return pytestconfig.stash.setdefault(DEATHS, [])
