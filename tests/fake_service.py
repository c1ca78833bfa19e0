"""Both children of `serve`, scripted: fake_service.py ADMIN_PORT ROUTER CONTROLLER CLUSTER proxy|controller ...

ROUTER is `steady`, `mute`, or `SIGKILL` and the like for how it ends once the controller is there. CONTROLLER is
`steady`, `absent`, `stubborn` (ignores SIGTERM, beside a process of the cluster) or the status it ends with.
The router's status shows one instance, ready once the controller is there, whose url is that of the controller;
every second time it is an error, every third time it says nothing at all. `foreign` shows another router's, with
everything ready, and ends with status 2 a moment later.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from disagg_router.controller.processes import marker, start_ticks
from disagg_router.controller.state import state_folder


class _Status(BaseHTTPRequestHandler):
    asked = 0
    there: Path
    fleet: str
    pid = os.getpid()

    def do_GET(self) -> None:
        type(self).asked += 1
        if self.asked % 3 == 0:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        ready = self.there.exists()
        one = {"id": "decode-0", "state": "ready" if ready else "starting", "url": self.fleet}
        self.send_response(500 if self.asked % 2 == 0 else 200)
        self.end_headers()
        status = {"pid": self.pid, "ready": ready, "settled": True, "instances": [one]}
        self.wfile.write(json.dumps(status).encode())

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def router(port: int, script: str, there: Path, fleet: str) -> None:
    if script == "mute":
        time.sleep(600)
    _Status.there, _Status.fleet = there, fleet
    if script == "foreign":
        there.touch()
        _Status.pid += 1
        threading.Timer(1.0, os._exit, [2]).start()
    server = HTTPServer(("127.0.0.1", port), _Status)
    server.timeout = 0.05
    while script in ("steady", "foreign") or not there.exists():
        server.handle_request()
    os.kill(os.getpid(), signal.Signals[script])


def controller(script: str, there: Path, cluster: str) -> None:
    if script == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"], env={**os.environ, **marker(cluster, "decode-0", "1")})
        folder = state_folder(cluster)
        folder.mkdir(parents=True)
        record = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "port": 1}
        (folder / "controller.json").write_text(json.dumps(record), encoding="utf-8")
    if script != "absent":
        there.touch()
    if script == "steady":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if script.isdigit():
        sys.exit(int(script))
    time.sleep(600)


def main() -> None:
    port, of_router, of_controller, cluster, kind, file, *words = sys.argv[1:]
    there = Path(file).with_name("controller-is-there")
    if kind == "proxy":
        router(int(port), of_router, there, words[words.index("--controller") + 1])
    else:
        controller(of_controller, there, cluster)


if __name__ == "__main__":
    main()
