"""The command line and environment of one engine. Pure."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from disagg_router.connectors.compatibility import argument_name
from disagg_router.errors import ConfigError
from disagg_router.interfaces import KVConnector
from disagg_router.listening import bracketed
from disagg_router.model import EngineAddress, EngineCommand, InstanceSpec, Launch

_REMOVE = "is set by the controller: remove it from args"
# vLLM's arguments that are not the operator's to set, and what to do instead.
OWNED_ARGS: Mapping[str, str] = {
    **dict.fromkeys(("host", "port", "uds", "kv-transfer-config", "kv-events-config", "data-parallel-rank"), _REMOVE),
    "model": "is set by the controller: set model.path instead",
    "served-model-name": "is set by the controller: set model.served_name instead",
    "revision": "is set by the controller: set model.revision instead",
    "config": "would set arguments that nobody here sees: write them into args instead",
    "api-key": "is not supported yet: remove it from args",
}
# Set to nothing where the node's own environment has them.
_CLOSED_ENV: Mapping[str, str] = {"VLLM_SERVER_DEV_MODE": "0", "VLLM_API_KEY": ""}
_CLOSED_WHY: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "it opens /sleep and /reset_prefix_cache",
    "VLLM_API_KEY": "keys are not supported yet",
}
_DEFAULT_CPU_BLOCK_SIZE_TOKENS = 128
_CPU_CONTEXTS = 4  # how many full-length contexts an engine on CPU holds unless told otherwise


def build_command(
    spec: InstanceSpec, address: EngineAddress, incarnation: str, connector: KVConnector
) -> EngineCommand:
    """argv and the environment entries to lay over the node's own (`overlay_env`).

    Raises ConfigError when the user's args or env name something that the controller decides.
    """
    args = _user_args(spec)
    launch = connector.launch(spec, address)
    _check_env(spec, launch)
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        **({"HF_HUB_OFFLINE": "1"} if _is_local(spec.model) else {}),
        **(_CPU_ENV if spec.device == "cpu" else {}),
        **launch.env,
        **spec.env,
        **_CLOSED_ENV,
    }
    if spec.device == "cpu":
        args = {**_cpu_args(args, env), **args}
    python_path = [*launch.python_path, *filter(None, [spec.env.get("PYTHONPATH")])]
    if python_path:
        env["PYTHONPATH"] = os.pathsep.join(python_path)
    transfer = {**launch.kv_transfer_config, "engine_id": incarnation}
    argv = [
        *(spec.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", spec.model, "--served-model-name", spec.served_name),
        *("--host", address.host, "--port", str(address.http_port)),
        *(["--revision", spec.revision] if spec.revision else []),
        *(word for key, value in args.items() for word in _flag(key, value)),
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--kv-events-config", json.dumps(_events(spec, address))),
    ]
    return EngineCommand(tuple(argv), env)


def overlay_env(base: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """`env` laid over the node's own environment; PYTHONPATH is put in front instead of replacing."""
    merged = {**base, **env}
    if "PYTHONPATH" in env and base.get("PYTHONPATH"):
        merged["PYTHONPATH"] = env["PYTHONPATH"] + os.pathsep + base["PYTHONPATH"]
    return merged


# uni instead of mp: one process and 1.3 GB less per engine. Both halves are needed, vLLM turns `uni` back into
# `mp` on CPU unless the variable is 0.
_CPU_ENV: Mapping[str, str] = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the supervisor sets the affinity
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def _cpu_args(args: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    extra: dict[str, Any] = {"enforce-eager": True}
    if env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        extra["distributed-executor-backend"] = "uni"
    # VLLM_CPU_KVCACHE_SPACE counts whole GiB that NIXL really touches; a number of blocks is finer. One context
    # of max-model-len (and a spare block) is the least that vLLM accepts, so without that length (the model's own
    # is not known here) nothing is set. Who sets the space wants all of it.
    max_len_tokens = _positive(args.get("max-model-len"))
    if max_len_tokens and env["VLLM_CPU_KVCACHE_SPACE"] == _CPU_ENV["VLLM_CPU_KVCACHE_SPACE"]:
        block_tokens = _positive(args.get("block-size")) or _DEFAULT_CPU_BLOCK_SIZE_TOKENS
        extra["num-gpu-blocks-override"] = _CPU_CONTEXTS * -(-max_len_tokens // block_tokens) + 1
    return extra


def _positive(value: object) -> int | None:
    """The number, or None for what is not a plain positive one (vLLM also takes `8k` and `auto`)."""
    text = str(value)
    return int(text) or None if text.isdecimal() else None


def _user_args(spec: InstanceSpec) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for raw, value in spec.args.items():
        key = argument_name(raw)
        if key in OWNED_ARGS:
            raise ConfigError(f"engine argument {raw!r} {OWNED_ARGS[key]}")
        if key == "data-parallel-size" and value not in (None, 1, "1"):
            raise ConfigError(
                f"engine argument {raw!r} is {value}, but data parallelism inside one instance is not supported yet: "
                "start one instance per rank"
            )
        args[key] = value
    return args


def _check_env(spec: InstanceSpec, launch: Launch) -> None:
    for key in spec.env:
        if key in _CLOSED_WHY:
            raise ConfigError(f"engine.env must not set {key}: {_CLOSED_WHY[key]}")
        if key in launch.env:
            raise ConfigError(f"engine.env must not set {key}: the connector does, differently for each instance")


def _flag(key: str, value: Any) -> Iterator[str]:  # noqa: ANN401 - any YAML value
    if value is None or value is False:
        return
    yield f"--{key}"
    if value is True:
        return
    if isinstance(value, dict):
        yield json.dumps(value)
    elif isinstance(value, list | tuple):
        yield from map(str, value)
    else:
        yield str(value)


def _events(spec: InstanceSpec, address: EngineAddress) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{_bindable(address.host)}:{address.kv_events_port}",
        "replay_endpoint": f"tcp://{bracketed(address.host)}:{address.kv_replay_port}",
        "topic": f"kv@{spec.id}",
    }


def _bindable(host: str) -> str:
    """`host` in a form that vLLM's publisher binds: it connects to every endpoint without `*` or `::` in it.

    The IPv4-mapped form is bound by ZeroMQ as plain IPv4, so that the events are not served to the whole network.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return "*"
    return f"[::ffff:{host}]" if version == 4 else f"[{host}]"


def _is_local(model: str) -> bool:
    return os.path.isabs(model) or model.startswith((".", "~"))
