"""The commands: exit codes, one line on stderr, nothing left running."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from disagg_router.cli import main
from disagg_router.config import cluster_id
from tests.e2e.serving import COMMAND, ROOT, environment, marked

GOOD = """
model: {{path: {model}, served_name: tiny}}
engine: {{device: cpu, args: {{max-model-len: 8192, block-size: 32}}}}
pools:
  prefill: {{instances: 1}}
  decode: {{instances: 1}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(GOOD.format(model=tmp_path / "model"), encoding="utf-8")
    return tmp_path


def run(folder: Path, *words: str, limit_s: float = 20, **env: str) -> subprocess.CompletedProcess[str]:
    """As a process of its own."""
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=limit_s, env=environment(folder) | env, check=False
    )


@pytest.fixture
def inside(monkeypatch, capsys):
    """The same in this process, for what ends before anything starts: (exit code, stdout, lines of stderr)."""

    def inside(*words: str) -> tuple[object, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["disagg-router", *words])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        return end.value.code, shown.out, shown.err.splitlines()

    return inside


def change(folder: Path, old: str, new: str) -> str:
    path = folder / "cluster.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("pools:", "pool:", "unknown key 'pool': did you mean 'pools'?"),
        ("block-size: 32", "block-size: 32, port: 1", "'port' is set by the controller: remove it from args"),
        ("/model,", "/modle,", "is not a model folder"),
        ("  prefill: {instances: 1}\n  decode: {instances: 1}", "  {}", "pools is empty"),
        ("instances: 1", "instances: 0", "instances: input should be greater than 0"),
        ("device: cpu", "device: cpu, python: /no/such/python", "/no/such/python is not an executable"),
        ("pools:", "connector: {name: nixel}\npools:", "connector.name 'nixel' is not known"),
        ("pools:", "router: {policy: {name: breakeven}}\npools:", "router.policy.name 'breakeven' is not known"),
    ],
)
def test_a_wrong_file_is_exit_code_2_and_one_line(folder, inside, old, new, says):
    """Before anything is started."""
    code, out, [line] = inside("serve", change(folder, old, new))
    assert (code, out, line[:7]) == (2, "", "error: ")
    assert says in line


@pytest.mark.parametrize("command", ["controller", "check-config"])
def test_the_other_commands_read_the_file_the_same_way(folder, inside, command):
    """One reader, one sentence."""
    path = change(folder, "pools:", "pool:")
    assert inside(command, path) == inside("serve", path)


def test_the_exit_code_is_the_processes_own(folder):
    """And stderr holds the one line, whatever logging does."""
    done = run(folder, "serve", change(folder, "pools:", "pool:"))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve"], "Missing argument"),
        (["serve", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["srve", "x"], "No such command"),
        (["serve", "x", "--prot", "1"], "No such option"),
        (["serve", "x", "--port", "70000"], "--port"),
        (["proxy", "{folder}/cluster.yaml"], "fleet is missing"),
        (
            ["proxy", "{folder}/cluster.yaml", "--controller", "http://127.0.0.1:1", "--admin-host", "0.0.0.0"],
            "admin_token",
        ),
    ],
)
def test_wrong_use_is_exit_code_2_and_one_line(folder, inside, words, says):
    """Usage errors too."""
    code, out, [line] = inside(*(word.format(folder=folder) for word in words))
    assert (code, out) == (2, "")
    assert says in line


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
@pytest.mark.parametrize("command", ["serve", "proxy"])
def test_a_port_in_use_is_said_before_any_engine_starts(folder, command, option):
    """Naming the option to change."""
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        port, other = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        words = [command, str(folder / "cluster.yaml"), option, str(port)]
        words += ["--admin-port" if option == "--port" else "--port", str(other)]
        words += ["--controller", "http://127.0.0.1:1"] if command == "proxy" else []
        done = run(folder, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        f"error: cannot listen on 127.0.0.1:{port} (Address already in use): choose another with {option}"
        in done.stderr
    )
    assert marked(cluster_id(folder / "cluster.yaml")) == []


def test_a_good_file_is_exit_code_0(folder):
    """And one object with --json."""
    done = run(folder, "check-config", str(folder / "cluster.yaml"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "is good: 1 prefill, 1 decode, policy threshold" in " ".join(done.stdout.split())
    shown = json.loads(run(folder, "check-config", str(folder / "cluster.yaml"), "--json").stdout)
    assert shown == {"ok": True, "pools": {"prefill": 1, "decode": 1}, "policy": "threshold"}


@pytest.mark.parametrize("example", ["local-cpu/cluster.yaml", "ray-job/cluster.yaml", "static-proxy/proxy.yaml"])
def test_the_examples_are_good(example, tmp_path):
    """As they stand, where `make setup` has made the model."""
    done = run(tmp_path, "check-config", str(ROOT / "examples" / example))
    assert (done.returncode, done.stderr) == (0, "")


def test_status_of_nothing_is_exit_code_1(tmp_path):
    """Naming the option."""
    done = run(tmp_path, "status", "--admin", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no router answers at http://127.0.0.1:9: give its admin listener with --admin\n"


def test_down_of_nothing_is_exit_code_0(folder):
    """Nothing to do is no failure."""
    done = run(folder, "down", str(folder / "cluster.yaml"))
    assert (done.returncode, done.stdout) == (0, "nothing of this cluster was running here\n")
    shown = json.loads(run(folder, "down", str(folder / "cluster.yaml"), "--json").stdout)
    assert shown == {"controller_pid": None, "killed": [], "left": []}


@pytest.mark.engine
def test_an_engine_that_dies_while_loading(folder):
    """One sentence, the end of its log, exit code 1, nothing left."""
    change(folder, "  prefill: {instances: 1}\n", "")
    path = change(folder, "block-size: 32", "block-size: 32, no-such-flag: 1")
    start = time.monotonic()
    done = run(folder, "serve", path, "--port", free_port(), "--admin-port", free_port(), limit_s=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert "ended while loading (exited with code 2); its log ends with:" in done.stderr
    assert "unrecognized arguments: --no-such-flag" in done.stderr
    assert time.monotonic() - start < 100
    assert marked(cluster_id(path)) == []


@pytest.mark.engine
def test_a_ray_address_that_does_not_answer(folder):
    """Said within 20 s, exit code 1, nothing left; ray.init alone would try for minutes."""
    path = str(folder / "cluster.yaml")
    done = run(
        folder, "serve", path, "--port", free_port(), "--admin-port", free_port(), limit_s=40, RAY_ADDRESS="127.0.0.1:1"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "answers at RAY_ADDRESS=127.0.0.1:1" in done.stderr
    assert marked(cluster_id(path)) == []


@pytest.mark.engine
@pytest.mark.long
def test_ctrl_c_while_engines_load(folder):
    """Ends it, with nothing left, and without a traceback."""
    path = str(folder / "cluster.yaml")
    command = [*COMMAND, "serve", path, "--port", free_port(), "--admin-port", free_port()]
    process = subprocess.Popen(command, env=environment(folder), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(
        "vllm" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in marked(cluster_id(path))
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(2)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert marked(cluster_id(path)) == []


def free_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def test_the_command_is_installed():
    """`disagg-router` beside the interpreter, as the docs call it."""
    command = Path(sys.executable).with_name("disagg-router")
    assert os.access(command, os.X_OK)
