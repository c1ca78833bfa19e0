"""A cost model that believes what the test says and remembers what it was told."""

from __future__ import annotations

from disagg_router.interfaces import Claim, PrefillWork
from disagg_router.model import InstanceId, Pair, Target
from disagg_router.timing import CostSnapshot, LinkTiming, TargetTiming

# A prefill takes 10 ms and 1 ms per token, a decode step 20 ms, whatever runs beside it.
TIMING = TargetTiming(
    prefill_a_s=0.01,
    prefill_b_s=0.001,
    prefill_c_s=0.0,
    step_d_s=0.02,
    step_e_s=0.0,
    step_f_s=0.0,
    chunk_tokens=512,
)
SNAPSHOT = CostSnapshot(target=TIMING, link=LinkTiming(handoff_s=0.01, bytes_per_s=1e9), kv_bytes_per_token=100.0)
# A prompt of 40 tokens, of which the decode target lacks 30, and an answer of 10.
CLAIM = Claim(
    decode_kv_bytes=5000.0,
    prefill_kv_bytes=4000.0,
    link_bytes=3000.0,
    prefill_tokens=40,
    prefill_attention=800.0,
    prefill_s=0.05,
)


class FixedCosts:
    """`believed` may be replaced; every report is kept as it came."""

    def __init__(self, believed: CostSnapshot = SNAPSHOT) -> None:
        self.believed = believed
        self.prefills: list[tuple[Target, PrefillWork, float, float]] = []  # with seconds and now_s
        self.steps: list[tuple[Target, float, float, float, float]] = []  # running, context, seconds, now_s
        self.handoffs: list[tuple[Pair, float, float, float]] = []  # bytes, seconds, now_s
        self.transfers: list[tuple[InstanceId, float, float, float]] = []  # bytes, seconds, now_s
        self.forgotten: list[Target] = []

    def snapshot(self, now_s: float) -> CostSnapshot:
        return self.believed

    def prefilled(self, target: Target, work: PrefillWork, seconds: float, now_s: float) -> None:
        self.prefills.append((target, work, seconds, now_s))

    def stepped(self, target: Target, running: float, context_tokens: float, seconds: float, now_s: float) -> None:
        self.steps.append((target, running, context_tokens, seconds, now_s))

    def handed_off(self, pair: Pair, moved_bytes: float, seconds: float, now_s: float) -> None:
        self.handoffs.append((pair, moved_bytes, seconds, now_s))

    def transferred(self, decode: InstanceId, moved_bytes: float, seconds: float, now_s: float) -> None:
        self.transfers.append((decode, moved_bytes, seconds, now_s))

    def forget(self, target: Target) -> None:
        self.forgotten.append(target)
