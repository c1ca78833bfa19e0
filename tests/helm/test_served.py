"""What `helm test` asks of a router."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.helm.chart import CHART, container_of_test, documents

pytestmark = pytest.mark.helm

Answers = dict[str, tuple[int, dict[str, Any]]]
CARDS = {"data": [{"id": "tiny"}]}
COMPLETION = {"usage": {"completion_tokens": 4}}
GOOD: Answers = {"/ready": (200, {}), "/v1/models": (200, CARDS), "/v1/completions": (200, COMPLETION)}


@contextmanager
def router(answers: Answers) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = answers[self.path]
            self.send_response(status)
            self.send_header("x-disagg-path", "local")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        do_GET: Callable[..., None] = answer
        do_POST: Callable[..., None] = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "answered 4 tokens, path local"),
        ({"/ready": (503, {})}, "was not ready within 0 s: HTTP Error 503"),
        ({"/v1/models": (200, {"data": [{"id": "other"}]})}, "serves ['other'], not tiny"),
        (
            {"/v1/completions": (429, {"error": {"code": "queue_full"}})},
            'answered 429: {"error": {"code": "queue_full"}}',
        ),
    ],
)
def test_helm_test_says_what_it_found(changes: Answers, says: str) -> None:
    """Good: exit status 0 and one line. Anything else: 1, and a line that says what it was."""
    with router(GOOD | changes) as url:
        command = [sys.executable, str(CHART / "files" / "served.py"), url, "tiny", "0", "5"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert says in done.stdout + done.stderr
    assert done.returncode == (1 if changes else 0)


def test_the_pod_runs_that_script_against_the_service() -> None:
    """As it stands in the chart, with the Service's name, the model and the two limits."""
    python, option, script, *words = container_of_test(documents({}))["args"]
    assert (python, option) == ("python", "-c")
    assert script.strip() == (CHART / "files" / "served.py").read_text(encoding="utf-8").strip()
    assert words == ["http://r-disagg-router:80", "qwen3-8b", "600", "60"]
