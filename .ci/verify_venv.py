"""Says whether this interpreter's site-packages hold every package that constraints.txt pins, with all of its files."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(constraints: Path) -> dict[str, str]:
    """Name to version. The one kind of marker the file uses is `platform_machine == "..."`."""
    wanted = {}
    for line in constraints.read_text(encoding="utf-8").splitlines():
        pin, _, marker = line.partition(";")
        if pin.strip() and not pin.startswith("#") and (not marker or platform.machine() in marker):
            name, _, version = pin.strip().partition("==")
            wanted[normal(name)] = version
    return wanted


def is_whole(dist: importlib.metadata.Distribution) -> bool:
    """Bytecode is left out: it is often cleaned away, and comes back by itself."""
    record = dist.read_text("RECORD") or ""
    folder = str(dist.locate_file(""))
    files = [row[0] for row in csv.reader(record.splitlines()) if not row[0].endswith(".pyc")]
    return bool(files) and all(os.path.exists(os.path.join(folder, file)) for file in files)


def main() -> None:
    wanted = pins(Path(sys.argv[1]))
    found = {normal(dist.name): dist for dist in importlib.metadata.distributions() if dist.name}
    wrong = [
        name
        for name, version in wanted.items()
        if name not in found or found[name].version.partition("+")[0] != version or not is_whole(found[name])
    ]
    if wrong:
        sys.exit(f"missing, broken or of another version: {', '.join(wrong)}")


main()
