"""The commands: exit codes, one line on stderr, nothing left running."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from disagg_router.cli import main, serve_plan
from disagg_router.config import load_config
from disagg_router.controller.cluster import cluster_id
from disagg_router.wiring import Addresses
from tests.e2e.serving import (
    COMMAND,
    ROOT,
    command_line,
    descendants,
    environment,
    free_port,
    marked,
    nothing_left_of,
)

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


def own_ports() -> list[str]:
    return ["--port", str(free_port()), "--admin-port", str(free_port())]


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
        (
            ["proxy", "{folder}/cluster.yaml", "--controller", "127.0.0.1:8100"],
            "--controller '127.0.0.1:8100' must look like http://HOST:PORT",
        ),
        (["proxy", "{folder}/cluster.yaml", "--controller", "http://h:99999"], "--controller 'http://h:99999' must"),
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


@pytest.mark.parametrize(
    ("host", "public_url", "admin_url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1", "http://127.0.0.1:2"),
        ("0.0.0.0", "http://0.0.0.0:1", "http://127.0.0.1:2"),
        ("::1", "http://[::1]:1", "http://[::1]:2"),
        ("::", "http://[::]:1", "http://[::1]:2"),
    ],
)
def test_the_urls_that_serve_shows_and_asks(folder, host, public_url, admin_url):
    """The limits are the file's own."""
    change(folder, "device: cpu", "device: cpu, start_limit_s: 100, stop_grace_s: 7")
    path = str(folder / "cluster.yaml")
    plan = serve_plan(load_config(path), path, Addresses(host, 1, host, 2))
    assert (plan.public_url, plan.admin_url) == (public_url, admin_url)
    assert (plan.ready_limit_s, plan.stop_grace_s, plan.cluster) == (160, 7, cluster_id(path))


def test_the_controllers_port_in_use_is_wrong_use_too(folder):
    """The same sentence, before Ray is asked for anything."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(folder, "controller", str(folder / "cluster.yaml"), "--port", str(port))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: cannot listen on 127.0.0.1:{port} (Address already in use): choose another with --port\n"
    )


def test_a_router_that_is_killed(folder):
    """`serve` ends with 1 and one line that says so; the controller that was starting ends with it."""
    path = str(folder / "cluster.yaml")
    command = [*COMMAND, "serve", path, *own_ports()]
    with nothing_left_of(cluster_id(path)):
        process = subprocess.Popen(command, env=environment(folder), stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 20
        while not (routers := [pid for pid in descendants(process.pid) if " proxy " in command_line(pid)]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(routers[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == (
        "error: the router was killed by SIGKILL, so everything was stopped: start again"
    )


@pytest.mark.parametrize(
    ("fleet", "says"),
    [
        ("{url: 'http://h:1', role: decode}, {url: 'http://h:1/', role: prefill}", "two instances have the"),
        ("{url: 'http://h:1', role: decode, id: a}, {url: 'http://h:2', role: prefill, id: a}", "have the id a"),
    ],
)
@pytest.mark.parametrize("command", ["check-config", "proxy"])
def test_a_list_that_names_an_instance_twice(tmp_path, inside, command, fleet, says):
    """check-config knows what proxy knows."""
    path = tmp_path / "proxy.yaml"
    path.write_text(f"model: {{served_name: t}}\nfleet: {{static: [{fleet}]}}\n", encoding="utf-8")
    ports = own_ports() if command == "proxy" else []
    code, out, [line] = inside(command, str(path), *ports)
    assert (code, out) == (2, "")
    assert line.startswith("error: fleet.static: two instances")
    assert says in line


def test_a_good_file_is_exit_code_0(folder):
    """And one object with --json."""
    done = run(folder, "check-config", str(folder / "cluster.yaml"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "is good: 1 prefill, 1 decode, policy break_even" in " ".join(done.stdout.split())
    shown = json.loads(run(folder, "check-config", str(folder / "cluster.yaml"), "--json").stdout)
    assert shown == {"ok": True, "pools": {"prefill": 1, "decode": 1}, "policy": "break_even"}


@pytest.mark.parametrize(
    "example",
    [
        *(f"ray-job/{name}.yaml" for name in ("cluster", "several-nodes")),
        "local-cpu/cluster.yaml",
        "static-proxy/proxy.yaml",
    ],
)
def test_the_examples_are_good(example, tmp_path):
    """As they stand, where `make setup` has made the model."""
    done = run(tmp_path, "check-config", str(ROOT / "examples" / example))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "bytes_per_token", "kv_bytes", "floor_s"),
    [
        # 80 layers x 8 heads x 128 x (K and V) x 2 bytes; 8,192 tokens are 2.5 GiB, at 12.5 GB/s 0.215 s.
        (["--layers", "80", "--tokens", "8192", "--gbit-per-s", "100"], 327_680, 5 * 2**29, 5 * 2**29 / 12.5e9),
        (["--layers", "80", "--tokens", "32768"], 327_680, 10 * 2**30, None),
        (["--layers", "32", "--tokens", "32768"], 131_072, 2**32, None),  # 4.29 GB
        (["--layers", "32", "--tokens", "32768", "--dtype", "fp8"], 65_536, 2**31, None),
    ],
)
def test_c57_kv_bytes(folder, words, bytes_per_token, kv_bytes, floor_s):
    """The contract's figures, worked by hand."""
    done = run(folder, "kv", "--kv-heads", "8", "--head-dim", "128", *words, "--json")
    shown = json.loads(done.stdout)
    assert shown == {"bytes_per_token": bytes_per_token, "bytes": kv_bytes, "transfer_floor_s": pytest.approx(floor_s)}


def test_kv_of_a_model_config(folder):
    """The tiny model: 2 layers x 2 heads x 32 x (K and V) x 2 bytes."""
    done = run(folder, "kv", "--config", str(ROOT / "model" / "config.json"), "--tokens", "10", "--json")
    assert json.loads(done.stdout) == {"bytes_per_token": 512, "bytes": 5120, "transfer_floor_s": None}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["kv"], "give either --config or all of"),
        (["kv", "--layers", "2"], "give either --config or all of"),
        (["kv", "--config", "{folder}/cluster.yaml"], "is not JSON"),
        (["kv", "--config", "{folder}/nowhere"], "cannot read"),
        (["kv", "--config", "{folder}/model/config.json"], "config.json does not give"),
        (["kv", "--layers", "1", "--kv-heads", "1", "--head-dim", "1", "--gbit-per-s", "0"], "Gbit"),
    ],
)
def test_kv_without_what_it_needs(folder, inside, words, says):
    """One sentence."""
    code, out, [line] = inside(*(word.format(folder=folder) for word in words))
    assert (code, out) == (2, "")
    assert says.lower() in line.lower()


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


@pytest.mark.parametrize("text", ["pool: {}", "a: [", None])
def test_down_needs_no_more_than_the_path(folder, text):
    """A file that became wrong, or is gone, must not keep its engines alive."""
    path = folder / "cluster.yaml"
    env = environment(folder) | {"DISAGG_ROUTER_INSTANCE": f"{cluster_id(path)}/decode-0/1"}
    engine = subprocess.Popen(["sleep", "600"], env=env)
    path.unlink() if text is None else path.write_text(text, encoding="utf-8")
    done = run(folder, "down", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "killed 1 process(es) that were left\n", "")
    assert engine.wait() == -signal.SIGKILL


def test_down_with_a_ray_that_is_away(folder):
    """What is here ends first; that other nodes could not be asked is a failure."""
    path = folder / "cluster.yaml"
    env = environment(folder) | {"DISAGG_ROUTER_INSTANCE": f"{cluster_id(path)}/decode-0/1"}
    engine = subprocess.Popen(["sleep", "600"], env=env)
    done = run(folder, "down", str(path), RAY_ADDRESS="127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "killed 1 process(es) that were left\n")
    assert engine.wait() == -signal.SIGKILL
    assert "no Ray 2.60.0 answers at RAY_ADDRESS=127.0.0.1:1" in done.stderr


def test_down_of_a_path_that_never_was(folder):
    """Good, since nothing runs, but a slip of the pen is pointed out."""
    done = run(folder, "down", str(folder / "clutser.yaml"))
    assert (done.returncode, done.stdout) == (0, "nothing of this cluster was running here\n")
    assert done.stderr == f"there is no file {folder}/clutser.yaml: is it the path that was started?\n"


@pytest.mark.engine
def test_an_engine_that_dies_while_loading(folder):
    """One sentence, the end of its log, exit code 1, nothing left."""
    change(folder, "  prefill: {instances: 1}\n", "")
    path = change(folder, "block-size: 32", "block-size: 32, no-such-flag: 1")
    start = time.monotonic()
    done = run(folder, "serve", path, *own_ports(), limit_s=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert "ended while loading (exited with code 2); its log ends with:" in done.stderr
    assert "unrecognized arguments: --no-such-flag" in done.stderr
    assert time.monotonic() - start < 100
    assert marked(cluster_id(path)) == []


@pytest.mark.engine
def test_a_ray_address_that_does_not_answer(folder):
    """Said within 20 s, exit code 1, nothing left; ray.init alone would try for minutes."""
    path = str(folder / "cluster.yaml")
    done = run(folder, "serve", path, *own_ports(), limit_s=40, RAY_ADDRESS="127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "answers at RAY_ADDRESS=127.0.0.1:1" in done.stderr
    assert marked(cluster_id(path)) == []


@pytest.mark.engine
@pytest.mark.long
def test_ctrl_c_while_engines_load(folder):
    """Ends it, with nothing left, and without a traceback."""
    path = str(folder / "cluster.yaml")
    command = [*COMMAND, "serve", path, *own_ports()]
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


def test_the_command_is_installed():
    """`disagg-router` beside the interpreter, as the docs call it."""
    command = Path(sys.executable).with_name("disagg-router")
    assert os.access(command, os.X_OK)
