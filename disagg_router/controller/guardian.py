"""Outlives the controller by a moment: when the controller dies without a word, ends what it left on this host.

Each engine's supervisor already watches its own actor. What is left is a Ray that the controller started, and
whatever slipped through. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from disagg_router.controller.processes import kill_marked, marker, wait_exit

# Longer than a supervisor's grace for orphans, so that engines end their own way where they can.
_GRACE_S = 5.0
_KILL_LIMIT_S = 5.0


class Guardian:
    """The controller's handle on its guardian process."""

    def __init__(self, cluster: str) -> None:
        command = [sys.executable, "-m", "disagg_router.controller.guardian", str(os.getpid()), cluster]
        # Marked itself, so that the next controller of this cluster ends it before it starts anything.
        env = {**os.environ, **marker(cluster, "guardian", str(os.getpid()))}
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def dismiss(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    controller, cluster = int(sys.argv[1]), sys.argv[2]
    # A Ctrl-C or a `kill` of the whole group is for the controller to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_exit(controller, None)
    time.sleep(_GRACE_S)
    kill_marked(cluster, _KILL_LIMIT_S)


if __name__ == "__main__":
    main()
