"""Starts cluster.yaml on this machine, asks a short and a long question, and compares with the engine alone."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

CLUSTER = Path(__file__).with_name("cluster.yaml")
START_LIMIT_S = 360  # serve's own: `engine.start_limit_s` of cluster.yaml and a minute
STOP_LIMIT_S = 45
QUESTIONS = {
    "short": "What is a KV cache?",
    "long": "Summarise this. " + "Prefill computes the prompt's KV once; decode reads it for every token. " * 40,
}
console = Console(width=max(Console().width, 100))  # where there is no terminal, 80 columns cut the table's words


@dataclass
class Outcome:
    name: str
    prompt_tokens: int
    path: str
    kv_bytes: float
    seconds: float
    equal: bool


@contextmanager
def serving() -> Iterator[tuple[str, str]]:
    """The router's public and admin URL; everything is stopped on the way out."""
    port, admin_port = free_port(), free_port()
    command = [sys.executable, "-m", "disagg_router", "serve", str(CLUSTER)]
    command += ["--port", str(port), "--admin-port", str(admin_port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not (line := process.stdout.readline()).startswith("ready "):
            sys.exit(f"serve ended with status {process.wait()} before it was ready")
        yield line.split()[1], f"http://127.0.0.1:{admin_port}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def ask(url: str, question: str) -> httpx.Response:
    """Greedy, and with a salt of its own, so that no answer can come out of an earlier one's cache."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 32,
        "temperature": 0,
        "return_token_ids": True,
        "cache_salt": secrets.token_hex(8),
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer


def token_ids(answer: httpx.Response) -> list[int]:
    return list(answer.json()["choices"][0]["token_ids"])


def kv_bytes_moved(engine_url: str) -> float:
    """What the decode engine says it has pulled so far."""
    text = httpx.get(f"{engine_url}/metrics", timeout=10).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == "vllm:nixl_bytes_transferred_sum")


def run(public_url: str, decode_url: str, name: str, question: str) -> Outcome:
    before, start = kv_bytes_moved(decode_url), time.monotonic()
    routed = ask(public_url, question)
    seconds = time.monotonic() - start
    time.sleep(0.5)  # the engine's counters follow its answers
    alone = ask(decode_url, question)
    return Outcome(
        name=name,
        prompt_tokens=routed.json()["usage"]["prompt_tokens"],
        path=routed.headers["x-disagg-path"],
        kv_bytes=kv_bytes_moved(decode_url) - before,
        seconds=seconds,
        equal=token_ids(routed) == token_ids(alone),
    )


def show(outcomes: list[Outcome]) -> None:
    table = Table("request", "prompt tokens", "path", "KV bytes moved", "seconds", "equals the engine alone")
    for one in outcomes:
        row = (one.name, one.prompt_tokens, one.path, f"{one.kv_bytes:,.0f}", f"{one.seconds:.2f}", one.equal)
        table.add_row(*map(str, row))
    console.print(table)


def main() -> None:
    start = time.monotonic()
    console.print(f"starting 1 prefill, 1 decode and the router on CPU (at most {START_LIMIT_S} s) ...")
    with serving() as (public_url, admin_url):
        status: dict[str, Any] = httpx.get(f"{admin_url}/status", timeout=10).json()
        decode_url = next(one["url"] for one in status["instances"] if one["role"] == "decode")
        outcomes = [run(public_url, decode_url, name, question) for name, question in QUESTIONS.items()]
        show(outcomes)
    console.print(f"stopped; the whole run took {time.monotonic() - start:.0f} s")
    short, long = outcomes
    good = short.path == "local" and long.path == "remote_prefill" and long.kv_bytes > 0 and short.equal and long.equal
    if not good:
        sys.exit("this is not what it should be: local without KV moved, then remote_prefill with; both equal")


if __name__ == "__main__":
    main()
