"""Short ways to say what a test is about; everything else takes a plain default."""

from __future__ import annotations

import dataclasses
from typing import Any

from disagg_router.model import (
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
)
from disagg_router.routing.fleet import partners_of
from disagg_router.timing import CostSnapshot, LinkTiming, TargetTiming
from disagg_router.view import ClusterView, TargetLoad, TargetView

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


# Of round numbers, for arithmetic by hand: 1,000 tokens are prefilled in 0.11 s, a step takes 10 ms and 1 ms for each
# further stream, and a token's KV of 1,000 bytes crosses the link in 1 us.
TIMING = TargetTiming(
    prefill_a_s=0.01, prefill_b_s=1e-4, prefill_c_s=0.0, step_d_s=0.009, step_e_s=0.001, step_f_s=0.0, chunk_tokens=2048
)
COSTS = CostSnapshot(target=TIMING, link=LinkTiming(handoff_s=0.02, bytes_per_s=1e9), kv_bytes_per_token=1000.0)


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


def view(*names: str, pairs: str = "", soft: bool = False, **loads: Any) -> ClusterView:
    """`pairs="p0>d0 p1>d0"`; a keyword gives a target's load, or just its number of running decodes."""

    def load(name: str) -> TargetLoad:
        given = loads.get(name, 0)
        return given if isinstance(given, TargetLoad) else TargetLoad(decodes=given)

    targets = tuple(TargetView(target(name), instance(name).role, load(name)) for name in names)
    couples = [pair(*couple.split(">")) for couple in pairs.split()]
    tested = partners_of(couples, [t.target for t in targets])
    return ClusterView(now_s=0.0, targets=targets, partners=tested, costs=COSTS, soft_roles=soft)


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
