"""Asks a router for one answer, as `helm test` does: URL MODEL READY_SECONDS ANSWER_SECONDS."""

import json
import sys
import time
import urllib.error
import urllib.request

base, model, ready_s, answer_s = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])


def call(path, body=None, limit_s=5.0):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=limit_s) as answer:
        return json.load(answer), answer.headers


def wait_ready():
    end_s = time.monotonic() + ready_s
    while True:
        try:
            return call("/ready")
        except OSError as exc:  # HTTPError and URLError are OSErrors too
            if time.monotonic() >= end_s:
                sys.exit(f"{base} was not ready within {ready_s:g} s: {exc}")
        time.sleep(2)


wait_ready()
served = [card["id"] for card in call("/v1/models")[0]["data"]]
if model not in served:
    sys.exit(f"{base} serves {served}, not {model}")
try:
    answer, headers = call("/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 4}, answer_s)
except urllib.error.HTTPError as exc:
    sys.exit(f"{base} answered {exc.code}: {exc.read(500).decode(errors='replace')}")
except OSError as exc:
    sys.exit(f"{base} did not answer within {answer_s:g} s: {exc}")
print(  # noqa: T201 - the one line that `helm test --logs` shows
    f"answered {answer['usage']['completion_tokens']} tokens, path {headers['x-disagg-path']}"
)
