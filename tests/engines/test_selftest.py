"""The self-test of a pair: passes on engines that move KV, fails with the reason on every kind that does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from disagg_router.connectors.nixl import NixlConnector
from disagg_router.engines.client import VllmClient
from disagg_router.engines.connection import UpstreamLimits
from disagg_router.engines.selftest import self_test
from disagg_router.errors import PairTestFailed
from disagg_router.model import Fingerprint, Instance, InstanceId, InstanceState, Role
from tests.fakes.engine import FakeEngine, Script


class LoopClock:
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass
class PairOfEngines:
    prefill: FakeEngine
    decode: FakeEngine
    client: VllmClient

    async def test(self, *, exact: bool = True, salt: str = "s") -> None:
        await self_test(
            self.client,
            NixlConnector(kv_load_failure_policy="recompute", lease_s=30),
            instance("prefill-0", Role.PREFILL, self.prefill),
            instance("decode-0", Role.DECODE, self.decode),
            served_name="tiny",
            salt=salt,
            exact=exact,
            clock=LoopClock(),
            leg_limit_s=0.3,
            counter_lag_s=0.3,
        )


def instance(name: str, role: Role, engine: FakeEngine) -> Instance:
    known = Fingerprint(block_size=32)
    return Instance(InstanceId(name), role, engine.url, InstanceState.READY, "1", engine.engine_id, known)


@pytest.fixture
async def pair() -> AsyncIterator[PairOfEngines]:
    fabric: dict[str, FakeEngine] = {}
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(FakeEngine(engine_id="p", fabric=fabric))
        decode = await stack.enter_async_context(FakeEngine(engine_id="d", fabric=fabric))
        client = VllmClient(UpstreamLimits(connect_s=1))
        stack.push_async_callback(client.close)
        yield PairOfEngines(prefill, decode, client)


@pytest.mark.parametrize("exact", [True, False])
async def test_a_good_pair_passes(pair: PairOfEngines, exact: bool) -> None:
    """Three prompts over two blocks long and no multiple of one are pulled, and nothing stays pinned."""
    await pair.test(exact=exact)
    pulled = [request.body for request in pair.decode.generations()]
    lengths = [len(body["prompt"]) for body in pulled]
    assert len(lengths) == 3
    assert all(length > 64 and length % 32 for length in lengths)
    assert pair.decode.pulled_tokens == sum(lengths)
    assert not pair.prefill.pinned
    assert all(("logprobs" in body) is not exact for body in pulled)


async def test_another_salt_makes_other_prompts(pair: PairOfEngines) -> None:
    """The same salt would find its prompts in the decode engine's cache."""
    await pair.test(salt="a")
    await pair.test(salt="b")
    prompts = [tuple(request.body["prompt"]) for request in pair.decode.generations()]
    assert len(set(prompts)) == 6


@pytest.mark.parametrize("exact", [True, False])
async def test_wrong_tokens(pair: PairOfEngines, exact: bool) -> None:
    """Corrupt KV shows in the answer."""
    pair.decode.pull = "corrupts"
    with pytest.raises(PairTestFailed, match="differs from the prefill engine's own"):
        await pair.test(exact=exact)


async def test_a_logprob_that_is_off(pair: PairOfEngines) -> None:
    """On unequal hardware the first token may agree by luck."""
    pair.decode.logprob_shift = 0.15
    with pytest.raises(PairTestFailed, match=r"off by 0\.150"):
        await pair.test(exact=False)


async def test_kv_that_was_not_pulled(pair: PairOfEngines) -> None:
    """Right answers prove nothing when the decode engine computed them itself."""
    pair.decode.pull = "recomputes"
    with pytest.raises(PairTestFailed, match="no KV was pulled: decode-0 counts 0 tokens"):
        await pair.test()


async def test_a_prefill_that_hands_over_too_few_blocks(pair: PairOfEngines) -> None:
    """Another block size than believed is found before the decode engine sees it."""
    pair.prefill.block_size = 64
    with pytest.raises(PairTestFailed, match="blocks where"):
        await pair.test()
    assert not pair.decode.generations()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(status=500), "decode-0 failed in the self-test: the engine answered 500"),
        (Script(hang=True), "decode-0 failed in the self-test: the engine sent nothing"),
        (Script(reset=True), "decode-0 failed in the self-test: the engine closed"),
    ],
    ids=["500", "silent", "reset"],
)
async def test_a_decode_engine_that_fails(pair: PairOfEngines, script: Script, message: str) -> None:
    """The reason is its own. No release is sent: whatever is left of the leg may still be reading the blocks."""
    pair.decode.script(script)
    with pytest.raises(PairTestFailed, match=message):
        await pair.test()
    assert not [r for r in pair.decode.generations() if r.body["max_tokens"] == 0]


async def test_a_test_that_is_cancelled_lets_the_blocks_go(pair: PairOfEngines) -> None:
    """Whoever runs the test may have a limit of its own."""
    pair.decode.script(Script(hang=True))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pair.test(), 0.15)
    async with asyncio.timeout(1):  # the decode engine sees the hang-up, and tells the prefill
        while pair.prefill.pinned:  # noqa: ASYNC110 - the engine's own tasks move it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("dead", ["prefill", "decode"])
async def test_an_engine_that_is_gone(pair: PairOfEngines, dead: str) -> None:
    """Either end unreachable is a reason, not a crash."""
    await getattr(pair, dead).die()
    with pytest.raises(PairTestFailed, match=r"did not accept a connection|could not be asked"):
        await pair.test()


async def test_an_answer_without_token_ids(pair: PairOfEngines) -> None:
    """A server that does not return them cannot be compared."""
    answer = b'{"choices":[{"text":"a"}]}'
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(answer)
    pair.prefill.script(Script(raw=(head + answer,)))
    with pytest.raises(PairTestFailed, match="no usable answer"):
        await pair.test()
