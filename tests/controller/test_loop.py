"""The controller's loop with a launcher that starts nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from disagg_router.controller.feed import FleetFeed
from disagg_router.controller.loop import Controller, LoopSettings
from disagg_router.controller.reconcile import Limits
from disagg_router.errors import LaunchError
from disagg_router.model import Fingerprint, InstanceId, InstanceState
from tests.controller.support import FakeClock, FakeLauncher, spec

SPECS = (spec("decode-0"), spec("prefill-0", index=1))


class Fleet:
    """A controller over fakes; `deaf` holds urls that do not answer."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.launcher, self.clock, self.feed = FakeLauncher(), FakeClock(), FleetFeed()
        self.deaf: set[str] = set()
        self.all_deaf = False
        self.controller = Controller(
            self.launcher,
            SPECS,
            healthy=self._healthy,
            fingerprint=lambda wanted: Fingerprint(model=wanted.model),
            clock=self.clock,
            feed=self.feed,
            settings=LoopSettings(limits=limits or Limits(), boot="b"),
        )

    async def _healthy(self, url: str) -> bool:
        return not self.all_deaf and url not in self.deaf

    def states(self) -> dict[str, str]:
        return {one.id: one.state.value for one in self.feed.snapshot.instances}

    async def until(self, condition: Callable[[], bool], rounds: int = 1000) -> None:
        for _ in range(rounds):
            if condition():
                return
            await self.controller.step()
            await self.clock.sleep(0.5)
        pytest.fail(f"not within {rounds} rounds: {self.states()}")


async def test_bring_up_ends_when_every_instance_answers() -> None:
    """Each instance is started once and published with all that a router needs."""
    fleet = Fleet()
    await fleet.controller.bring_up()
    assert fleet.states() == {"decode-0": "ready", "prefill-0": "ready"}
    one = fleet.feed.snapshot.instances[0]
    assert one.url.startswith("http://127.0.0.1:")
    assert one.engine_id == one.incarnation == "decode-0-b-1"
    assert one.fingerprint.model == "/models/tiny"
    port = int(one.url.rpartition(":")[2])
    assert (one.kv_events, one.side_channel) == (f"tcp://127.0.0.1:{port + 2}", f"127.0.0.1:{port + 1}")


async def test_an_instance_that_dies_while_loading_shows_its_log() -> None:
    """The first line is the sentence, the log's end follows."""
    fleet = Fleet()
    fleet.all_deaf = True
    fleet.launcher.logs["decode-0"] = ["Traceback", "OSError: no such weights"]
    start = asyncio.create_task(fleet.controller.bring_up())
    for _ in range(10):
        await asyncio.sleep(0)
    fleet.launcher.kill("decode-0", "exited with code 1")
    with pytest.raises(LaunchError) as caught:
        await start
    first, *rest = str(caught.value).splitlines()
    assert first == "decode-0 ended while loading (exited with code 1); its log ends with:"
    assert rest == ["  Traceback", "  OSError: no such weights"]


async def test_an_instance_that_never_answers() -> None:
    """Loading has a limit."""
    fleet = Fleet(Limits(start_limit_s=30))
    fleet.all_deaf = True
    with pytest.raises(LaunchError, match=r"did not answer within 30 s"):
        await fleet.controller.bring_up()


async def test_an_instance_that_cannot_be_placed() -> None:
    """What the launcher says is passed on as it is."""
    fleet = Fleet()
    fleet.launcher.refuse["prefill-0"] = "no node could take prefill-0"
    with pytest.raises(LaunchError, match="no node could take prefill-0"):
        await fleet.controller.bring_up()


async def test_a_dead_instance_comes_back_under_a_new_name() -> None:
    """Its place in the fleet stays, failed, until the next incarnation is up."""
    fleet = Fleet()
    await fleet.controller.bring_up()
    before = fleet.feed.snapshot.version
    fleet.launcher.kill("decode-0")
    await fleet.until(lambda: fleet.states()["decode-0"] == InstanceState.FAILED)
    await fleet.until(lambda: fleet.states()["decode-0"] == InstanceState.READY)
    assert fleet.feed.snapshot.instances[0].incarnation == "decode-0-b-2"
    assert fleet.feed.snapshot.version > before
    assert ("Stop", "decode-0-b-1") in fleet.launcher.applied
    assert fleet.launcher.starts("prefill-0") == 1


async def test_restarts_back_off() -> None:
    """An instance that cannot be started again is tried ever less often: after 1, 2, 4, 8, 16 and 32 seconds."""
    fleet = Fleet()
    await fleet.controller.bring_up()
    fleet.launcher.kill("decode-0")
    fleet.launcher.refuse["decode-0"] = "no GPU left"
    begun_s = fleet.clock.time_s
    await fleet.until(lambda: fleet.clock.time_s - begun_s > 70)
    assert fleet.launcher.starts("decode-0") == 7
    assert fleet.states()["decode-0"] == InstanceState.FAILED


async def test_an_instance_that_stops_answering_is_not_restarted() -> None:
    """Unreachable is published; the process is there, so nothing is started."""
    fleet = Fleet()
    await fleet.controller.bring_up()
    fleet.deaf.add(fleet.feed.snapshot.instances[1].url)
    await fleet.until(lambda: fleet.states()["prefill-0"] == InstanceState.UNREACHABLE)
    fleet.deaf.clear()
    await fleet.until(lambda: fleet.states()["prefill-0"] == InstanceState.READY)
    assert fleet.launcher.starts("prefill-0") == 1


async def test_stop_ends_every_incarnation() -> None:
    """Routers are told before the engines go."""
    fleet = Fleet()
    await fleet.controller.bring_up()
    await fleet.controller.stop()
    assert fleet.launcher.running == {}
    assert set(fleet.states().values()) == {"draining"}


async def test_routers_may_wait_while_engines_stop() -> None:
    """A feed that is closed answers at once: they would ask again and again until the API is gone."""
    fleet = Fleet()
    await fleet.controller.bring_up()
    await fleet.controller.stop()
    waiting = asyncio.create_task(fleet.feed.after(fleet.feed.snapshot.version, 60))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    waiting.cancel()


async def test_stop_overtakes_a_start() -> None:
    """An instance that is being started is stopped too."""
    fleet = Fleet()
    await fleet.controller.step()
    await fleet.controller.stop()
    assert fleet.launcher.running == {}
    assert fleet.launcher.starts(InstanceId("decode-0")) == 1
