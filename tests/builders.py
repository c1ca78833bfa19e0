"""Short ways to say what a test is about; everything else takes a plain default."""

from __future__ import annotations

import dataclasses
from typing import Any

from disagg_router.model import (
    ClusterView,
    Fingerprint,
    InferenceRequest,
    Instance,
    InstanceId,
    InstanceSpec,
    InstanceState,
    Pair,
    Role,
    Slo,
    Target,
    TargetLoad,
    TargetView,
)

FINGERPRINT = Fingerprint(
    model="./model",
    revision="default",
    vllm_version="0.32.0",
    dtype="auto",
    kv_dtype="auto",
    block_size=32,
    attention_backend="auto",
    kv_layout="auto",
    connector="nixl:pull",
    tensor_parallel=1,
    pipeline_parallel=1,
)


def request(**changes: Any) -> InferenceRequest:
    plain = InferenceRequest(
        id="r1",
        endpoint="/v1/completions",
        stream=False,
        splittable=True,
        slo=Slo(ttft_s=2.0, tpot_s=0.1, max_gap_s=0.5),
    )
    return dataclasses.replace(plain, **changes)


def instance(name: str, role: Role | None = None, **changes: Any) -> Instance:
    """`p0` is a prefill, `d0` a decode, `u0` a unified instance."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "u": Role.UNIFIED}
    plain = Instance(
        id=InstanceId(name),
        role=role or roles[name[0]],
        url=f"http://{name}:1",
        state=InstanceState.READY,
        incarnation=f"{name}-first",
        engine_id=f"{name}-first",
        fingerprint=FINGERPRINT,
    )
    return dataclasses.replace(plain, **changes)


def target(name: str) -> Target:
    return Target(InstanceId(name))


def pair(prefill: str, decode: str) -> Pair:
    return Pair(InstanceId(prefill), InstanceId(decode))


def view(*names: str, pairs: str = "", **decodes: int) -> ClusterView:
    """`pairs="p0>d0 p1>d0"`; a keyword gives a target's number of running decodes."""
    targets = tuple(
        TargetView(target(name), instance(name).role, TargetLoad(decodes=decodes.get(name, 0))) for name in names
    )
    tested = frozenset(pair(*couple.split(">")) for couple in pairs.split())
    return ClusterView(now_s=0.0, targets=targets, pairs=tested)


def spec(**changes: Any) -> InstanceSpec:
    plain = InstanceSpec(
        id=InstanceId("prefill-0"),
        cluster="c",
        role=Role.PREFILL,
        index=0,
        model="./model",
        served_name="tiny",
        revision=None,
        device="cpu",
        python="python",
        args={},
        env={},
        gpus=0,
        cpus=None,
        labels={},
    )
    return dataclasses.replace(plain, **changes)
