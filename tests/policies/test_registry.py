"""Adding a policy is one file, one registry line, one test file and one row in the docs."""

from __future__ import annotations

from pathlib import Path

from disagg_router.policies.registry import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]


def test_each_policy_has_its_file_its_test_and_its_row():
    """And nothing is registered under another name than its file's."""
    docs = (ROOT / "policies" / "README.md").read_text(encoding="utf-8")
    for name in BUILT_IN:
        assert (ROOT / "policies" / f"{name}.py").is_file()
        assert (ROOT / "tests" / "policies" / f"test_{name}.py").is_file()
        assert f"| `{name}`" in docs
