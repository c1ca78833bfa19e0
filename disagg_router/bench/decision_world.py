"""A prefix index, prompts and a fleet, made up to be as large as a router is meant to carry."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from disagg_router.bench.decision_traffic import Traffic
from disagg_router.model import InferenceRequest, InstanceId, Slo, Target
from disagg_router.routing.holdings import GPU
from disagg_router.routing.prefix_index import PrefixIndex
from disagg_router.timing import CostSnapshot, LinkTiming, TargetTiming

VOCABULARY = 128_000
FILL_BLOCKS = 512  # per chain that is only there to fill the index
HOLDERS = 8  # targets that hold a start of one known prompt
KNOWN_PROMPTS = 32
SLO = Slo(ttft_s=2.0, tpot_s=0.05, max_gap_s=0.5)

# About an 8B model on one large GPU; only the orders of magnitude matter here.
TIMING = TargetTiming(
    prefill_a_s=0.012,
    prefill_b_s=4e-5,
    prefill_c_s=6e-10,
    step_d_s=0.008,
    step_e_s=5e-5,
    step_f_s=6e-8,
    prefill_sd=0.1,
    step_sd=0.1,
)
LINK = LinkTiming(handoff_s=0.01, bytes_per_s=25e9, sd=0.2)
KV_BYTES_PER_TOKEN = 131_072.0


@dataclass(frozen=True, slots=True)
class Size:
    """`blocks` is how many (target, block) entries the index holds."""

    targets: int = 64
    prompt_tokens: int = 32_768
    block_tokens: int = 16
    blocks: int = 1_000_000


class World:
    """The same seed makes the same world, the same prompts and the same views."""

    def __init__(self, size: Size, seed: int, built: Callable[[int], None] = lambda _: None) -> None:
        """`built` hears how many blocks the index holds so far."""
        self.size = size
        self._rng = random.Random(seed)
        self._targets = [Target(InstanceId(f"unified-{i}")) for i in range(size.targets)]
        costs = CostSnapshot(TIMING, LINK, KV_BYTES_PER_TOKEN, {t: self._timing() for t in self._targets})
        self.traffic = Traffic(self._targets, costs, SLO, self._rng)
        self._known = [self._tokens() for _ in range(KNOWN_PROMPTS)]
        self.index = PrefixIndex(2 * size.blocks)
        self._fill(built)

    def prompts(self, count: int) -> Iterator[array[int]]:
        """In random order: half begin as a known prompt does and go their own way from some token on; the other half
        share nothing with anybody. Arrays, as our own tokenizer hands them on."""
        for _ in range(count):
            start, end = self._rng.sample(self._known, 2)
            cut = self._rng.randrange(len(start))
            tokens = start[:cut] + end[cut:]
            if self._rng.random() < 0.5:
                tokens[0] = VOCABULARY + self._rng.randrange(VOCABULARY)
            yield tokens

    def request(self) -> InferenceRequest:
        """Before anything is known of its prompt."""
        return InferenceRequest(
            id="bench",
            endpoint="/v1/completions",
            stream=True,
            splittable=True,
            slo=SLO,
            tiebreak=self._rng.random(),
            output_tokens=float(self._rng.randrange(32, 512)),
        )

    def _timing(self) -> TargetTiming:
        factor = self._rng.uniform(0.8, 1.25)
        return dataclasses.replace(TIMING, prefill_b_s=TIMING.prefill_b_s * factor, step_d_s=TIMING.step_d_s * factor)

    def _tokens(self) -> array[int]:
        return array("I", self._rng.choices(range(VOCABULARY), k=self.size.prompt_tokens))

    def _fill(self, built: Callable[[int], None]) -> None:
        """The known prompts at some targets each, to different depths; then chains that nobody will ask for."""
        size, rng = self.size, self._rng
        blocks = size.prompt_tokens // size.block_tokens
        for tokens in self._known:
            hashes = [rng.getrandbits(64) for _ in range(blocks)]
            for target in rng.sample(self._targets, min(HOLDERS, len(self._targets))):
                depth = rng.randint(1, blocks)
                self._store(target, tokens[: depth * size.block_tokens].tolist(), hashes[:depth])
        entries, chain = self.index.stats().entries, 0
        while entries < size.blocks:
            depth = min(FILL_BLOCKS, size.blocks - entries)
            text = [2 * VOCABULARY + chain] * (depth * size.block_tokens)
            self._store(rng.choice(self._targets), text, [rng.getrandbits(64) for _ in range(depth)])
            entries, chain = entries + depth, chain + 1
            built(entries)

    def _store(self, target: Target, tokens: list[int], hashes: list[int]) -> None:
        self.index.stored(target, hashes, None, tokens, self.size.block_tokens, medium=GPU)
