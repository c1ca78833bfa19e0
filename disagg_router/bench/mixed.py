"""`python -m disagg_router.bench.mixed`: policies against one another under a mixed load, on engines on this CPU."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from disagg_router import command
from disagg_router.bench.contenders import SUBJECT, chosen
from disagg_router.bench.figures import verdicts
from disagg_router.bench.load import Load
from disagg_router.bench.processes import EngineSettings
from disagg_router.bench.report import as_data, comparison
from disagg_router.bench.turns import Plan, measure
from disagg_router.errors import ConfigError

SERVED_NAME = "bench"
CONTEXT_TOKENS = 8192
BLOCK_TOKENS = 32
TABLE_CELLS = 150
KV_CONTEXTS = 8  # so many contexts in an engine's cache: the room for KV is not what is measured here


def mixed(
    rounds: Annotated[int, typer.Option(min=1, help="Each contender has a turn in each, in random order.")] = 6,
    round_s: Annotated[float, typer.Option(min=5, help="How long a turn is.")] = 40,
    only: Annotated[str | None, typer.Option(metavar="NAME,...", help="Some of the contenders.")] = None,
    model: Annotated[str, typer.Option(help="A model folder whose tokenizer makes a token of each letter.")] = "model",
    long_output: Annotated[int, typer.Option(min=1, help="Tokens that a long prompt asks for.")] = 96,
    seed: Annotated[int, typer.Option(help="Of arrivals, prompts, order and intervals.")] = 1,
    logs: Annotated[Path | None, typer.Option(help="Where logs go; a new folder if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, the table on stderr.")] = False,
) -> int:
    """Chat streams and long prompts against each policy in turn, on two engines with a core each.

    Ends with 1 when break_even is worse than the best other contender beyond the interval of their difference.
    """
    contenders = chosen(only)
    settings = _settings(model)
    folder = (logs or Path(tempfile.mkdtemp(prefix="bench-mixed-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(contenders, Load(SERVED_NAME, long_output_tokens=long_output), rounds, round_s, seed)
    progress = Console(stderr=True)

    def say(line: str) -> None:
        progress.print(line, highlight=False, markup=False, soft_wrap=True)

    say(f"logs: {folder}; about {_expected_s(plan) / 60:.0f} minutes")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(plan, settings, folder, say))
    judged = verdicts(found, SUBJECT, seed) if SUBJECT in found and len(found) > 1 else []
    wide = Console(
        stderr=as_json, width=max(Console().width, TABLE_CELLS)
    )  # where there is no terminal it is cut at 80
    wide.print(comparison(found, SUBJECT, judged, seed))
    if as_json:
        command.print_json(as_data(found, SUBJECT, judged, seed))
    return 0 if all(one.holds for one in judged) else 1


def _settings(model: str) -> EngineSettings:
    """Raises ConfigError."""
    folder = Path(model).resolve()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {model} is not a model folder (no config.json in it): `make setup` makes one")
    blocks = KV_CONTEXTS * CONTEXT_TOKENS // BLOCK_TOKENS + 1
    args = {"max-model-len": CONTEXT_TOKENS, "block-size": BLOCK_TOKENS, "num-gpu-blocks-override": blocks}
    return EngineSettings(str(folder), SERVED_NAME, args)


def _expected_s(plan: Plan) -> float:
    """Engines take a minute and a half; a turn brings some seconds of its own with it."""
    return 90 + len(plan.contenders) * (25 + plan.rounds * (plan.round_s + 6))


if __name__ == "__main__":
    command.run(mixed)
