"""What every command shares: exit codes, errors as one line on stderr, figures as one JSON object on stdout."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from disagg_router.errors import ConfigError, DisaggError

# typer carries its own copy of click and exports only this leaf of click's tree of usage errors.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def run(command: Callable[..., Any]) -> None:
    """As a program of its own. Exit codes: 0 what was to be shown holds, 1 it does not or something failed, 2 wrong
    use."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    with exit_codes():
        sys.exit(app(standalone_mode=False) or 0)


@contextmanager
def exit_codes() -> Iterator[None]:
    """1 for what failed and 2 for wrong use, with one line that says what to do; 130 for Ctrl-C."""
    try:
        yield
    except _UsageError as exc:
        _fail(getattr(exc, "format_message", exc.__str__)(), 2)
    except ConfigError as exc:
        _fail(str(exc), 2)
    except DisaggError as exc:
        _fail(str(exc), 1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(128 + signal.SIGINT)


def print_json(data: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(data) + "\n")


def _fail(message: str, status: int) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(status)
