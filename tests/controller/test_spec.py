"""The engine's command line, for CPU and CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from disagg_router.connectors.registry import build_connector
from disagg_router.controller.spec import build_command, overlay_env
from disagg_router.errors import ConfigError
from disagg_router.interfaces import KVConnector
from disagg_router.model import EngineAddress, EngineCommand, InstanceSpec
from tests.controller.support import ADDRESS, spec


@pytest.fixture
def connector() -> KVConnector:
    return build_connector("nixl", kv_load_failure_policy="recompute", lease_s=30)


def built(wanted: InstanceSpec, connector: KVConnector, address: EngineAddress = ADDRESS) -> EngineCommand:
    return build_command(wanted, address, "decode-0-b-1", connector)


def value_of(command: EngineCommand, flag: str) -> str | None:
    """The word after a flag; None when the flag is not there."""
    return command.argv[command.argv.index(flag) + 1] if flag in command.argv else None


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("-m", "vllm.entrypoints.openai.api_server"),
        ("--model", "/models/tiny"),
        ("--served-model-name", "tiny"),
        ("--host", "127.0.0.1"),
        ("--port", "21001"),
        ("--max-model-len", "8192"),
        ("--distributed-executor-backend", "uni"),
        ("--num-gpu-blocks-override", "1025"),  # four contexts of 256 blocks and one to spare
    ],
)
def test_cpu_argv(connector: KVConnector, flag: str, value: str) -> None:
    """A CPU engine gets the settings that keep it small."""
    assert value_of(built(spec(), connector), flag) == value


@pytest.mark.parametrize("flag", ["--enforce-eager", "--distributed-executor-backend", "--num-gpu-blocks-override"])
def test_cuda_has_none_of_the_cpu_flags(connector: KVConnector, flag: str) -> None:
    """On CUDA vLLM's own defaults hold."""
    assert flag not in built(spec(device="cuda", gpus=1, cpus=None), connector).argv


@pytest.mark.parametrize(
    ("device", "name", "value"),
    [
        ("cpu", "VLLM_TARGET_DEVICE", "cpu"),
        ("cpu", "VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("cpu", "VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("cpu", "VLLM_CPU_KVCACHE_SPACE", "1"),
        ("cpu", "HF_HUB_OFFLINE", "1"),
        ("cpu", "VLLM_NO_USAGE_STATS", "1"),
        ("cpu", "VLLM_SERVER_DEV_MODE", "0"),
        ("cuda", "VLLM_SERVER_DEV_MODE", "0"),
        ("cuda", "VLLM_API_KEY", ""),
        ("cuda", "VLLM_TARGET_DEVICE", None),
        ("cuda", "OMP_NUM_THREADS", None),
        ("cuda", "VLLM_NO_USAGE_STATS", "1"),
    ],
)
def test_env(connector: KVConnector, device: str, name: str, value: str | None) -> None:
    """Environment per device."""
    assert built(spec(device=device), connector).env.get(name) == value


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"enable-scale-out": True}, ["--enable-scale-out"]),
        ({"seed": 0}, ["--seed", "0"]),
        ({"enforce-eager": False}, []),
        ({"tokenizer": None}, []),
        ({"allowed-origins": ["a", "b"]}, ["--allowed-origins", "a", "b"]),
        ({"compilation-config": {"level": 3}}, ["--compilation-config", '{"level": 3}']),
        ({"max_num_seqs": 4}, ["--max-num-seqs", "4"]),
    ],
)
def test_user_args(connector: KVConnector, args: dict[str, object], words: list[str]) -> None:
    """YAML values become vLLM flags."""
    argv = built(spec(device="cuda", args=args), connector).argv
    start, end = argv.index("21001") + 1, argv.index("--kv-transfer-config")
    assert list(argv[start:end]) == words


@pytest.mark.parametrize(
    ("changes", "flag", "value"),
    [
        ({"args": {"num-gpu-blocks-override": 300}}, "--num-gpu-blocks-override", "300"),
        ({"args": {"distributed-executor-backend": "mp"}}, "--distributed-executor-backend", "mp"),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}}, "--num-gpu-blocks-override", None),
        ({"args": {}}, "--num-gpu-blocks-override", None),  # the model's own length is not known here
        ({"args": {}}, "--max-model-len", None),
        ({"args": {"max-model-len": 8192}}, "--num-gpu-blocks-override", "257"),  # vLLM's blocks of 128 on CPU
        ({"args": {}, "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}}, "--distributed-executor-backend", None),
        ({"args": {"enforce-eager": False}}, "--enforce-eager", None),
        ({"model": "org/name", "revision": "abc"}, "--revision", "abc"),
    ],
)
def test_the_user_wins(connector: KVConnector, changes: dict[str, Any], flag: str, value: str | None) -> None:
    """Whatever the user sets replaces our default for CPU."""
    assert value_of(built(spec(**changes), connector), flag) == value


@pytest.mark.parametrize(
    "key", ["port", "host", "uds", "--kv-transfer-config", "kv_events_config", "data-parallel-rank", "config"]
)
def test_owned_args_are_refused(connector: KVConnector, key: str) -> None:
    """An argument that the controller decides is an error that names it."""
    with pytest.raises(ConfigError, match=key):
        built(spec(args={key: "x"}), connector)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"model": "x"}, "'model' is set by the controller: set model.path instead"),
        ({"served-model-name": "x"}, "set model.served_name instead"),
        ({"revision": "x"}, "set model.revision instead"),
        ({"api-key": "x"}, "'api-key' is not supported yet"),
        ({"data-parallel-size": 2}, "'data-parallel-size' is 2, .* start one instance per rank"),
        ({"--data_parallel_size": "4"}, "'--data_parallel_size' is 4, .* start one instance per rank"),
    ],
)
def test_a_refused_arg_says_what_to_do_instead(connector: KVConnector, args: dict[str, object], says: str) -> None:
    """Where the setting is, or that there is none."""
    with pytest.raises(ConfigError, match=says) as caught:
        built(spec(args=args), connector)
    assert "x'" not in str(caught.value)  # a key is not shown


@pytest.mark.parametrize("ranks", [1, "1", None])
def test_one_rank_is_no_data_parallelism(connector: KVConnector, ranks: object) -> None:
    """Saying the default is fine."""
    assert built(spec(args={"data-parallel-size": ranks}), connector)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("VLLM_SERVER_DEV_MODE", "it opens /sleep"),
        ("VLLM_API_KEY", "not supported yet"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "the connector does"),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", "the connector does"),
    ],
)
def test_env_that_is_not_the_operators_is_refused(connector: KVConnector, key: str, says: str) -> None:
    """One port for every instance of a pool would be one too few."""
    with pytest.raises(ConfigError, match=f"engine.env must not set {key}: .*{says}"):
        built(spec(env={key: "1"}), connector)


def test_the_nodes_own_environment_opens_nothing(connector: KVConnector) -> None:
    """Dev mode stays shut, and no key is asked for, on a node whose environment says otherwise."""
    node = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "k"}
    assert overlay_env(node, built(spec(), connector).env).items() >= {
        ("VLLM_SERVER_DEV_MODE", "0"),
        ("VLLM_API_KEY", ""),
    }


def test_hub_models_may_download(connector: KVConnector) -> None:
    """Only a local model makes the hub unnecessary."""
    assert "HF_HUB_OFFLINE" not in built(spec(model="org/name"), connector).env


def test_engine_id_is_the_incarnation(connector: KVConnector) -> None:
    """A restarted engine must not be taken for the one before."""
    config = json.loads(value_of(built(spec(), connector), "--kv-transfer-config") or "")
    assert config["engine_id"] == "decode-0-b-1"


@pytest.mark.parametrize(
    ("host", "endpoint", "replay"),
    [
        ("10.0.0.7", "tcp://[::ffff:10.0.0.7]:21003", "tcp://10.0.0.7:21004"),
        ("fd00::2", "tcp://[fd00::2]:21003", "tcp://[fd00::2]:21004"),
        ("node-1", "tcp://*:21003", "tcp://node-1:21004"),
    ],
)
def test_kv_events_are_bound_on_the_host(connector: KVConnector, host: str, endpoint: str, replay: str) -> None:
    """vLLM binds only endpoints with `*` or `::` in them, and connects to all others."""
    command = built(spec(), connector, EngineAddress(host, 21001, 21002, 21003, 21004))
    events = json.loads(value_of(command, "--kv-events-config") or "")
    assert (events["endpoint"], events["replay_endpoint"]) == (endpoint, replay)


def test_python_path_is_put_in_front(connector: KVConnector) -> None:
    """The connector's folder, then the user's, then the node's own."""
    command = built(spec(env={"PYTHONPATH": "/mine"}), connector)
    joined = overlay_env({"PYTHONPATH": "/node", "HOME": "/root"}, command.env)
    ours, mine, node = joined["PYTHONPATH"].split(":")
    assert ours.endswith("engine_side")
    assert (mine, node, joined["HOME"]) == ("/mine", "/node", "/root")


_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for argv in json.load(sys.stdin):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(args)
    print(args.kv_transfer_config.engine_id, args.kv_events_config.endpoint, args.port)
"""


@pytest.mark.engine
def test_vllm_accepts_the_argv_of_cpu_and_cuda(connector: KVConnector) -> None:
    """The real parser takes every word and reads what was meant."""
    args = {"max-model-len": 8192, "block-size": 32, "seed": 0}
    commands = [built(spec(device=device, args=args), connector) for device in ("cpu", "cuda")]
    done = subprocess.run(
        [sys.executable, "-c", _PARSE],
        input=json.dumps([command.argv[3:] for command in commands]),
        env=overlay_env({"PATH": "/usr/bin:/bin", "HOME": "/tmp"}, commands[0].env),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-2:] == ["decode-0-b-1 tcp://[::ffff:127.0.0.1]:21003 21001"] * 2, done.stderr
