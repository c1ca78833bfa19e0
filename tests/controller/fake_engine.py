"""Stands in for a vLLM server: a child in its own session that ignores SIGTERM, then /health on HOST:PORT."""

from __future__ import annotations

import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        del format, args  # the log is the engine's


def main() -> None:
    host, port, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    sys.stdout.write("loading weights\n")
    sys.stdout.flush()
    if mode == "die":
        sys.exit("no such weights")
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)
    ThreadingHTTPServer((host, port), _Health).serve_forever()


if __name__ == "__main__":
    main()
