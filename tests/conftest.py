"""What every test shares: what is told at the end of the report."""

from __future__ import annotations

import pytest

from tests.deaths import DEATHS

MEASURED = pytest.StashKey[list[str]]()

HEAD = ("killed with SIGKILL", "what of it was waited for", "all gone after s", "new one tested after s")


@pytest.fixture
def measured(pytestconfig: pytest.Config) -> list[str]:
    """Lines about what came out, whether or not it was asserted."""
    return pytestconfig.stash.setdefault(MEASURED, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash.get(DEATHS, []):
        terminalreporter.section("deaths")
        widths = [max(len(row[i]) for row in [HEAD, *rows]) for i in range(len(HEAD))]
        for row in [HEAD, *rows]:
            terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    if lines := config.stash.get(MEASURED, []):
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
