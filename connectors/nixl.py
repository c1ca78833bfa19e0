"""NIXL, pull: the decode engine reads the blocks that the prefill engine has pinned for it under a lease."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar

from disagg_router.connectors.base import one_token_body
from disagg_router.errors import UpstreamError
from disagg_router.model import Body, EngineAddress, Handoff, Instance, InstanceSpec, Launch, Pair, Role

_ENGINE_SIDE = str(Path(__file__).resolve().parent / "engine_side")
# The pull connector does not look at kv_role (any engine prefills for any other); it is there for who reads the logs.
_KV_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.UNIFIED: "kv_both"}


class NixlConnector:
    """Fields and failure behaviour as measured on vLLM 0.32."""

    name: ClassVar[str] = "nixl"
    direction: ClassVar[str] = "pull"
    concurrent_legs: ClassVar[bool] = False  # the decode leg needs the block ids in the prefill's answer
    soft_roles: ClassVar[bool] = True
    can_skip_load: ClassVar[bool] = False

    def __init__(self, *, kv_load_failure_policy: str, lease_s: float) -> None:
        self.lease_s = lease_s
        self._failure_policy = kv_load_failure_policy

    def launch(self, spec: InstanceSpec, address: EngineAddress) -> Launch:
        config: dict[str, object] = {
            "kv_connector": "NixlConnector",
            "kv_role": _KV_ROLE[spec.role],
            "kv_load_failure_policy": self._failure_policy,
            # Equal on both sides: the decode engine beats every lease / 6, each beat adds two thirds of a lease.
            "kv_connector_extra_config": {"kv_lease_duration": math.ceil(self.lease_s)},
        }
        env = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": address.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(address.side_channel_port),
        }
        if spec.device == "cpu":
            config |= {"kv_buffer_device": "cpu", "kv_connector_module_path": "nixl_on_cpu"}
            return Launch(config, env, python_path=(_ENGINE_SIDE,))
        return Launch(config, env)

    def begin(self, request_id: str, prefill: Instance, decode: Instance) -> Handoff:
        return Handoff(
            pair=Pair(prefill.id, decode.id),
            request_id=request_id,
            prefill_incarnation=prefill.incarnation,
            decode_incarnation=decode.incarnation,
            prefill_engine_id=prefill.engine_id,
            block_size=prefill.fingerprint.block_size,
        )

    def prefill_body(self, body: Body, handoff: Handoff) -> Body:
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        return {**one_token_body(body), "kv_transfer_params": params}

    def complete(self, handoff: Handoff, answer: Body, now_s: float) -> Handoff:
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            raise UpstreamError(f"{handoff.pair.prefill} answered a prefill without a handoff")
        engine_id = params.get("remote_engine_id")
        expected = handoff.prefill_engine_id
        if expected is not None and engine_id not in (expected, f"{expected}_dp0"):
            raise UpstreamError(f"{handoff.pair.prefill} was restarted: its handoff names engine {engine_id}")
        _check_blocks(handoff, params)
        return dataclasses.replace(handoff, params=params, answered_s=now_s)

    def decode_body(self, body: Body, handoff: Handoff) -> Body:
        return {**body, "kv_transfer_params": handoff.params}

    def local_body(self, body: Body, *, load_external: bool) -> Body:
        return body

    def release_body(self, model: Any, handoff: Handoff) -> Body | None:  # noqa: ANN401 - a body's field as it is
        """A decode request the engine refuses (no tokens asked for) makes it tell the prefill engine to let go."""
        return {"model": model, "prompt": [0], "max_tokens": 0, "kv_transfer_params": handoff.params}


def _check_blocks(handoff: Handoff, params: Body) -> None:
    """A decode engine given too few blocks dies, and one given another block size answers with the wrong KV."""
    groups, tokens = params.get("remote_block_ids"), params.get("remote_num_tokens")
    if not isinstance(groups, list) or not groups or not all(isinstance(group, list) and group for group in groups):
        raise UpstreamError(f"{handoff.pair.prefill} answered a handoff without blocks")
    if handoff.block_size is None or not isinstance(tokens, int):
        return
    expected = math.ceil(tokens / handoff.block_size)
    if len(groups[0]) != expected:
        raise UpstreamError(
            f"{handoff.pair.prefill} handed over {len(groups[0])} blocks where {tokens} tokens need {expected}"
        )
