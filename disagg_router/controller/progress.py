"""What a person sees on stderr while engines load."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Console
from rich.status import Status

from disagg_router.model import InstanceId, InstanceState


class StartProgress:
    """One line that changes on a terminal, one line per change elsewhere. A context, so that the line is cleared."""

    def __init__(self, console: Console, now_s: Callable[[], float]) -> None:
        self._console = console
        self._now_s = now_s
        self._since_s = now_s()
        self._shown: Mapping[InstanceId, InstanceState] = {}
        self._status = Status("", console=console) if console.is_terminal else None

    def __enter__(self) -> StartProgress:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.started()

    def started(self) -> None:
        """No more changing line; changes of state are still printed."""
        if self._status:
            self._status.stop()
            self._status = None

    def __call__(self, states: Mapping[InstanceId, InstanceState]) -> None:
        elapsed_s = self._now_s() - self._since_s
        if self._status:
            self._status.update(", ".join(f"{id} {state}" for id, state in states.items()) + f" ({elapsed_s:.0f} s)")
        for id, state in states.items():
            if self._shown.get(id) != state:
                self._console.print(f"{id}: {state} after {elapsed_s:.1f} s", highlight=False)
        self._shown = dict(states)
