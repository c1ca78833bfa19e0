"""The simulated scheduler against vLLM's own: the same requests, and in every step the same tokens of the same ones."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from disagg_router.sim import scheduler as sim
from disagg_router.sim.client import tokens_of
from disagg_router.sim.jobs import Job
from disagg_router.sim.scheduler import Room, Scheduler
from tests.sim.engines import Heard, content

BLOCK_TOKENS = 16
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]


def asked(seed: int) -> dict[str, Any]:
    """80 requests, too many for the memory, whose prompts begin as one of three conversations does. Some clients go."""
    rng = random.Random(seed)
    blocks, requests = rng.choice([20, 40, 80]), list[dict[str, Any]]()
    for number in range(80):
        prompt = rng.randrange(1, blocks * BLOCK_TOKENS * 2 // 3)
        output = rng.randrange(1, blocks * BLOCK_TOKENS // 4)
        talk, shared = 1000 * rng.randrange(1, 4), rng.randrange(0, (prompt - 1) // BLOCK_TOKENS + 1)
        own = 100_000 + 1000 * number
        full = (prompt + output) // BLOCK_TOKENS + 1
        ids = [*range(talk, talk + shared), *range(own, own + full - shared)]
        comes = rng.randrange(960)
        goes = comes + rng.randrange(100) if rng.random() < 0.1 else None
        tokens = list(tokens_of(ids, BLOCK_TOKENS))[: prompt + output]
        requests.append({"id": str(number), "comes": comes, "goes": goes, "prompt": prompt, "tokens": tokens})
    return {
        "model": str(ROOT / "model"),
        "block_tokens": BLOCK_TOKENS,
        "blocks": blocks,
        "chunk_tokens": rng.choice([64, 256, 1024]),
        "max_running": rng.choice([1, 4, 64]),
        "requests": requests,
    }


def steps(given: dict[str, Any]) -> list[dict[str, int]]:
    """As vllm_steps has them."""
    room = Room(given["chunk_tokens"], given["blocks"] * BLOCK_TOKENS, BLOCK_TOKENS, given["max_running"])
    scheduler, found = Scheduler(room, Heard()), list[dict[str, int]]()
    to_come, live = list(given["requests"]), dict[str, tuple[Job, dict[str, Any]]]()
    while to_come or live:
        for one in [one for one in to_come if one["comes"] <= len(found)]:
            to_come.remove(one)
            live[one["id"]] = _job(one), one
            scheduler.waiting.append(sim.Sequence(live[one["id"]][0], None))
        for id_ in [id_ for id_, (_, one) in live.items() if one["goes"] == len(found)]:
            scheduler.remove(live.pop(id_)[0])
        chunks = scheduler.next().chunks
        streams = list(scheduler.decoding())
        found.append({str(one.job.number): 1 for one in streams} | {str(one.job.number): n for one, n in chunks})
        for one in streams:
            one.job.tokens += 1
            scheduler.grown(one, 1)
        for one, tokens in chunks:
            scheduler.computed(one, tokens)
            one.job.tokens += one.decoding
        for one in [one for one in scheduler.decoding() if one.job.tokens >= one.job.output_tokens]:
            scheduler.leave(one)
            scheduler.cache.release(one.held)
            del live[str(one.job.number)]
    return found


def _job(one: dict[str, Any]) -> Job:
    blocks = one["tokens"][: len(one["tokens"]) // BLOCK_TOKENS * BLOCK_TOKENS : BLOCK_TOKENS]
    prompt, output = one["prompt"], len(one["tokens"]) - one["prompt"]
    return Job(
        int(one["id"]), prompt_tokens=prompt, output_tokens=output, blocks=blocks, keys=content(blocks, BLOCK_TOKENS)
    )


async def test_every_step_is_vllms_own():
    """Twelve random traffics: chunks, shared prefixes, eviction, preemption, clients that go. No prompt and no answer
    is all cached: of a block that is computed once more vLLM keeps both copies, and the simulation one."""
    traffics = [asked(seed) for seed in range(12)]
    command = [sys.executable, str(Path(__file__).with_name("vllm_steps.py"))]
    done = subprocess.run(  # noqa: ASYNC221 - nothing else is to go on meanwhile
        command, input=json.dumps(traffics), capture_output=True, text=True, timeout=250, check=True, cwd=ROOT
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    for seed, (given, expected) in enumerate(zip(traffics, theirs, strict=True)):
        ours = steps(given)
        different = next((place for place, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b), None)
        assert different is None, f"seed {seed}, step {different}: {ours[different]} and not {expected[different]}"
        assert len(ours) == len(expected)
