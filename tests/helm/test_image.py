"""The images' recipe. No container engine here: it is linted, and its install steps run in a virtual one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helm.chart import CHART, ROOT, WORLDS, documents, one

pytestmark = pytest.mark.helm

RECIPE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def stages() -> dict[str, str]:
    """Name to instructions; lines that go on are joined."""
    text = re.sub(r"^#.*\n", "", RECIPE.replace("\\\n", ""), flags=re.MULTILINE)
    found = {}
    for part in re.split(r"^(?=FROM )", text, flags=re.MULTILINE)[1:]:
        first, _, rest = part.partition("\n")
        found[first.split(" AS ")[1].strip()] = rest
    return found


def test_the_recipe_lints() -> None:
    """hadolint's opinion, the shell in it included."""
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_chart_asks_for_images_that_the_recipe_has() -> None:
    """The variant at the end of a tag is the target's name."""
    helpers = "".join(file.read_text(encoding="utf-8") for file in (CHART / "templates").rglob("*.*"))
    assert '"router")' in helpers
    assert {"router", "cuda", "cpu"} == {name for name in stages() if not name.startswith("build")}


@pytest.mark.parametrize("target", ["router", "cuda", "cpu"])
def test_no_image_runs_as_root(target: str) -> None:
    """The same user as the chart's."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    user = values["poolDefaults"]["podSecurityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in stages()[target]


def test_what_is_copied_is_there_and_is_sent() -> None:
    """.dockerignore lets nothing through but what the build copies."""
    copied = {word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", RECIPE, re.MULTILINE) for word in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    assert {line.removeprefix("!") for line in IGNORED if line.startswith("!")} == copied


def test_the_gpu_pins_are_what_the_project_asks_for() -> None:
    """Each requirement is pinned, within its range."""
    lines = (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        canonicalize_name(r.name): r for r in map(Requirement, (line for line in lines if not line.startswith("#")))
    }
    for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]):
        wanted = Requirement(text)
        [pin] = pins[canonicalize_name(wanted.name)].specifier
        assert wanted.specifier.contains(pin.version), text


def commands(stage: str, places: dict[str, str]) -> list[str]:
    """A stage's RUN lines without those of the base's own packages, with its folders moved."""
    lines = re.findall(r"^RUN (.*)$", stages()[stage], re.MULTILINE)
    found = [line for line in lines if "dnf" not in line]
    for inside, here in places.items():
        found = [line.replace(inside, here) for line in found]
    return found


@pytest.mark.long
def test_the_routers_image_installs(tmp_path: Path) -> None:
    """Its steps as they stand, in a clean virtual environment: what comes out reads a rendered file and knows Ray."""
    source, wheels, home = tmp_path / "src", tmp_path / "wheels", tmp_path / "venv"
    source.mkdir()
    for name in (line.removeprefix("!") for line in IGNORED if line.startswith("!")):
        found = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(found, source / name, symlinks=True, ignore=ignore) if found.is_dir() else shutil.copy(
            found, source
        )
    places = {"/wheels": str(wheels), "/opt/disagg-router": str(home)}
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in (*commands("build", places), *commands("build-router", places)):
        done = subprocess.run(
            ["bash", "-ec", command], cwd=source, env=os.environ | python, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "cluster.yaml").write_text(one(documents(WORLDS["defaults"]), "ConfigMap")["data"]["cluster.yaml"])
    for words in (["disagg-router", "check-config", str(tmp_path / "cluster.yaml")], ["ray", "--version"]):
        done = subprocess.run([home / "bin" / words[0], *words[1:]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert not (home / "bin" / "vllm").exists()
