"""What stands beside values.yaml is made from it, and the chart lints. Part of `make test`: a setting that is added to
the package has to reach the chart's schema."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, ROOT, run


def test_readme_and_schema_are_up_to_date() -> None:
    """values.yaml and the settings' models are the one source."""
    command = [sys.executable, str(ROOT / "helm" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_chart_installs_the_version_it_lies_beside() -> None:
    """appVersion names the images' tag."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (project["version"], project["version"])


def test_the_chart_lints() -> None:
    """helm's own opinion."""
    done = run("lint", "--strict", str(CHART))
    assert "1 chart(s) linted, 0 chart(s) failed" in done.stdout


@pytest.mark.helm
def test_the_chart_packs(tmp_path: Path) -> None:
    """A package holds what the templates read, and nothing that belongs elsewhere."""
    done = run("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [package] = tmp_path.iterdir()
    shown = run("show", "readme", str(package))
    assert "## Engine pools" in shown.stdout
    assert run("template", "r", str(package)).returncode == 0
