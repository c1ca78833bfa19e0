"""The rendered cluster file: what the values say, taken by the command that reads it, and by the real engine."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from disagg_router.cli import check_config
from disagg_router.config import load_config
from disagg_router.controller.cluster import instance_specs
from disagg_router.controller.spec import build_command
from disagg_router.model import EngineAddress
from disagg_router.wiring import connector_of
from tests.helm.chart import CPU, WORLDS, Values, container, documents, merged, one, pods

pytestmark = pytest.mark.helm

FILE = "/etc/disagg-router/cluster.yaml"


def cluster_file(values: Values, folder: Path) -> Path:
    """The ConfigMap's one file, with the model's folder moved to where this machine has one."""
    text = one(documents(values), "ConfigMap")["data"]["cluster.yaml"]
    data = yaml.safe_load(text)
    if data["model"]["path"].startswith("/"):
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}", encoding="utf-8")
        text = text.replace(data["model"]["path"], str(model))
    (folder / "cluster.yaml").write_text(text, encoding="utf-8")
    return folder / "cluster.yaml"


@pytest.mark.parametrize("world", ["defaults", "cpu", "unified", "two-by-two-rdma", "one-node", "proxy-only"])
def test_check_config_takes_the_rendered_file(world: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command itself."""
    check_config(str(cluster_file(WORLDS[world], tmp_path)))
    assert "is good" in capsys.readouterr().out


def test_the_file_is_the_values_as_they_are(tmp_path: Path) -> None:
    """Nothing is added, renamed or reckoned; large numbers stay numbers."""
    wanted = {"router": {"index_entries": 12_345_678, "policy": {"name": "threshold", "tokens": 2_000_000}}}
    text = one(documents(merged(CPU, {"config": wanted})), "ConfigMap")["data"]["cluster.yaml"]
    assert yaml.safe_load(text)["router"]["index_entries"] == 12_345_678
    (tmp_path / "cluster.yaml").write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "cluster.yaml")
    assert config.router.policy.options == {"tokens": 2_000_000}
    assert (config.engine.device, config.model.path) == ("cpu", "org/tiny")


def test_router_and_head_read_the_same_file() -> None:
    """One ConfigMap, at one path: the path names the cluster."""
    found = pods(documents({}))
    for name in ("router", "head"):
        template = found[name]
        [mount] = [m for m in container(template)["volumeMounts"] if m["name"] == "config"]
        assert (mount["mountPath"], mount["subPath"]) == (FILE, "cluster.yaml")
        assert any(FILE in word for word in container(template)["args"])
    assert len({found[name]["metadata"]["annotations"]["checksum/config"] for name in ("router", "head")}) == 1


@pytest.mark.parametrize("world", ["defaults", "cpu", "unified", "two-by-two-rdma"])
def test_a_pod_has_room_for_one_instance_of_its_pool(world: str) -> None:
    """As many pods as instances; each a Ray node with the labels, the CPU and the GPUs that its instance asks for."""
    docs = documents(WORLDS[world])
    config = yaml.safe_load(one(docs, "ConfigMap")["data"]["cluster.yaml"])
    counts = {
        doc["metadata"]["labels"].get("disagg-router/pool"): doc["spec"].get("replicas")
        for doc in docs
        if doc["kind"] == "Deployment"
    }
    for ray in (doc for doc in docs if doc["kind"] == "RayCluster"):
        counts |= {group["groupName"]: group["replicas"] for group in ray["spec"]["workerGroupSpecs"]}
    for role, pool in config["pools"].items():
        labels = (
            ["--labels=" + ",".join(f"{key}={value}" for key, value in pool["labels"].items())]
            if "labels" in pool
            else []
        )
        assert counts[role] == pool["instances"]
        assert {"--num-cpus=1", f"--num-gpus={pool['gpus']}", *labels} <= set(container(pods(docs)[role])["args"])


_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for argv in json.load(sys.stdin):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(args)
    print(args.served_model_name, args.max_model_len, args.tensor_parallel_size, args.kv_transfer_config.kv_connector)
"""


def test_vllm_takes_the_engines_words(tmp_path: Path) -> None:
    """Every instance of every example, by vLLM's own parser."""
    argvs = []
    for world in ("defaults", "cpu", "one-node", "two-by-two-rdma"):
        (folder := tmp_path / world).mkdir()
        config = load_config(cluster_file(WORLDS[world], folder))
        for spec in instance_specs(config, "c"):
            command = build_command(spec, EngineAddress("10.0.0.7", 1, 2, 3, 4), "one", connector_of(config))
            argvs.append(command.argv[3:])
    done = subprocess.run(
        [sys.executable, "-c", _PARSE],
        input=json.dumps(argvs),
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if "NixlConnector" in line]
    assert len(lines) == len(argvs) == 10, done.stderr[-3000:]
    assert lines[0] == "['qwen3-8b'] 16384 1 NixlConnector"
    assert lines[-1] == "['llama-3.3-70b'] 65536 8 NixlConnector"


_WORDS = """
import json, sys
import typer
from ray.scripts.scripts import start
from disagg_router.cli import app
commands = {"ray": {"start": start}, "disagg-router": typer.main.get_command(app).commands}
for tool, name, *words in json.load(sys.stdin):
    print(commands[tool][name].make_context(name, words).params)
"""


def test_the_containers_words_are_taken() -> None:
    """`ray start`, `disagg-router proxy` and `disagg-router controller` parse what the chart gives them."""
    found = pods(documents(WORLDS["two-by-two-rdma"]))
    shell, flags, script, *_ = container(found["head"])["args"]
    assert (shell, flags) == ("bash", "-ec")
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    start, controller = (shlex.split(line) for line in script.replace("\\\n", " ").replace('"$@"', "").splitlines())
    words = [start, controller[1:], container(found["prefill"])["args"], container(found["router"])["args"]]
    done = subprocess.run(
        [sys.executable, "-c", _WORDS], input=json.dumps(words), capture_output=True, text=True, check=False
    )
    head, driver, engine, router = map(ast.literal_eval, done.stdout.splitlines())
    assert (head["head"], head["num_cpus"], head["num_gpus"], head["port"]) == (True, 0, 0, 6379)
    assert (driver["cluster"], driver["host"], driver["port"]) == (FILE, "0.0.0.0", 8100)
    assert (engine["address"], engine["num_gpus"]) == ("r-disagg-router-head:6379", 8)
    assert (engine["labels"], engine["block"]) == ("pool=prefill", True)
    assert router["config_file"] == FILE
    assert router["controller_url"] == "http://r-disagg-router-head:8100"
    assert (router["port"], router["admin_host"], router["admin_port"]) == (8000, "0.0.0.0", 8001)
