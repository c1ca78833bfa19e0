"""The fleet from Kubernetes, against a scripted API server on a real socket."""

from __future__ import annotations

import asyncio
import logging
import random
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from disagg_router.config import KubernetesConfig
from disagg_router.errors import ConfigError
from disagg_router.model import Fingerprint, InstanceState, Role
from disagg_router.routing.clock import MonotonicClock
from disagg_router.routing.kubernetes_api import Access, KubernetesApi, find_access
from disagg_router.routing.kubernetes_objects import Condition, Slice, of_slices
from disagg_router.routing.kubernetes_source import KubernetesSource
from tests.builders import FINGERPRINT
from tests.fakes.kubernetes import PODS, SLICES, FakeKubernetes, endpoint, endpoint_slice, pod, serving

UP, DRAINING = (
    InstanceState.STARTING,
    InstanceState.DRAINING,
)  # a source only declares; the brain finds out who is ready
VLLM = {"pods": [{"selector": "app=vllm", "port": 8000, "role": "decode"}]}


class _Hasty(MonotonicClock):
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.005)


class Watching:
    """A source under observation: `seen` is its last snapshot."""

    def __init__(self, source: KubernetesSource) -> None:
        self._source, self.snapshots = source, []
        self._task = asyncio.create_task(self._watch())

    @property
    def seen(self):
        return {one.id: one for one in self.snapshots[-1].instances} if self.snapshots else {}

    async def until(self, holds, limit_s: float = 5.0) -> None:
        async with asyncio.timeout(limit_s):
            while not self.snapshots or not holds(self.seen):
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.005)

    async def _watch(self) -> None:
        async for snapshot in self._source.watch():
            self.snapshots.append(snapshot)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def source(
    api: FakeKubernetes, *, resync_s: float = 60.0, token_file: Path | None = None, **entries
) -> KubernetesSource:
    settings = KubernetesConfig.model_validate(entries or VLLM).model_copy(update={"resync_s": resync_s})

    def describe(entry):
        return Fingerprint() if entry.args is None else FINGERPRINT

    access = Access(api.url, "ai", token_file, None)
    return KubernetesSource(settings, lambda: KubernetesApi(access), describe, _Hasty(), random.Random(1))


@asynccontextmanager
async def watching(api: FakeKubernetes, **options):
    async with serving(api):
        seen = Watching(source(api, **options))
        try:
            yield seen
        finally:
            await seen.close()


async def test_pods_and_services_are_the_fleet():
    """Pods by their labels on the entry's port, the pods behind a Service on its port of that name; both at once."""
    api = FakeKubernetes()
    api.put(pod("p-0", ip="10.0.0.1", labels="app=vllm,role=prefill", uid="abc", restarts=2))
    api.put(pod("other", labels="app=web,role=prefill"))
    api.put(pod("p-6", ip="fd00::6", labels="app=vllm,role=prefill"))
    api.put(endpoint_slice("s-1", "decodes", endpoint("d-0", "10.0.0.3", ready=True), port=8200))
    api.put(endpoint_slice("s-2", "web", endpoint("w-0", "10.0.0.4", ready=True)))
    entries = {
        "pods": [{"selector": "app=vllm, role=prefill", "port": 8000, "role": "prefill", "args": {}}],
        "services": [{"name": "decodes", "port": "http", "role": "decode"}],
    }
    async with watching(api, **entries) as fleet:
        await fleet.until(lambda seen: len(seen) == 3)
        shown = [(i.id, i.role, i.url, i.incarnation, i.fingerprint) for i in fleet.seen.values()]
        assert shown == [
            ("d-0", Role.DECODE, "http://10.0.0.3:8200", "", Fingerprint()),
            ("p-0", Role.PREFILL, "http://10.0.0.1:8000", "abc/2", FINGERPRINT),
            ("p-6", Role.PREFILL, "http://[fd00::6]:8000", "u1/0", FINGERPRINT),
        ]
        assert {i.state for i in fleet.seen.values()} == {UP}


@pytest.mark.parametrize(
    ("now", "state", "incarnation"),
    [
        (pod("b", ready=False), DRAINING, "u1/0"),
        (pod("b", terminating=True), DRAINING, "u1/0"),
        (pod("b", labels="app=web"), None, None),
        (None, None, None),
        (pod("b", restarts=1), UP, "u1/1"),
        (pod("b", uid="u2"), UP, "u2/0"),
        (pod("b", ip=""), None, None),
    ],
    ids=["unready", "terminating", "relabelled", "deleted", "restarted in place", "replaced", "without an address"],
)
async def test_what_becomes_of_a_pod(now, state, incarnation):
    """Who is to finish what it has is kept as draining; who no longer matches is gone; a new start is another one."""
    api = FakeKubernetes()
    api.put(pod("a", ip="10.0.0.9"))
    api.put(pod("b"))
    async with watching(api) as fleet:
        await fleet.until(lambda seen: len(seen) == 2)
        before = fleet.seen["b"]
        api.put(now) if now else api.delete(PODS, "b")
        await fleet.until(lambda seen: seen.get("b") != before)
        after = fleet.seen.get("b")
        assert (after and (after.state, after.incarnation)) == (state and (state, incarnation))
        assert fleet.seen["a"].state is UP
        api.put(pod("b", uid="u3"))
        await fleet.until(lambda seen: "b" in seen and seen["b"].incarnation == "u3/0" and seen["b"].state is UP)


@pytest.mark.parametrize("not_yet", [pod("b", ready=False), pod("b", terminating=True), pod("b", ip="")])
async def test_a_pod_that_was_never_ready_is_not_shown(not_yet):
    """One that loads its model is no instance that drains."""
    api = FakeKubernetes()
    api.put(pod("a", ip="10.0.0.9"))
    api.put(not_yet)
    async with watching(api) as fleet:
        await fleet.until(lambda seen: list(seen) == ["a"])
        api.put(pod("b"))
        await fleet.until(lambda seen: list(seen) == ["a", "b"])


@pytest.mark.parametrize(
    ("conditions", "condition"),
    [
        ({}, Condition.READY),
        ({"ready": None, "serving": None, "terminating": None}, Condition.READY),
        ({"ready": True, "serving": True, "terminating": False}, Condition.READY),
        ({"ready": False, "serving": False, "terminating": False}, Condition.UNREADY),
        ({"ready": True, "serving": False, "terminating": False}, Condition.UNREADY),  # publishNotReadyAddresses
        ({"ready": False, "serving": True, "terminating": True}, Condition.TERMINATING),
        ({"ready": True, "serving": True, "terminating": True}, Condition.TERMINATING),  # publishNotReadyAddresses
    ],
)
def test_an_endpoints_condition(conditions, condition):
    """As the API's reference defines them: what is not said counts as ready."""
    [server] = of_slices(slices(endpoint_slice("s", "d", endpoint("x", **conditions))), 8000)
    assert server.condition is condition


def slices(*told):
    return msgspec.convert(told, type=tuple[Slice, ...])


@pytest.mark.parametrize(
    ("told", "port", "servers"),
    [
        ([endpoint_slice("s", "d")], 8000, []),
        ([endpoint_slice("s", "d", endpoint("x"))], "grpc", []),
        ([endpoint_slice("s", "d", endpoint("x"), port=1), endpoint_slice("t", "d", endpoint("y"), port=2)], "http",
         [("x", "10.0.0.1:1", 0), ("y", "10.0.0.1:2", 0)]),
        ([endpoint_slice("a", "d", endpoint("x", "fd00::1"), family="IPv6"), endpoint_slice("b", "d", endpoint("x"))],
         8000, [("x", "10.0.0.1:8000", 0)]),
        ([endpoint_slice("a", "d", endpoint("x")), endpoint_slice("b", "d", endpoint("x", terminating=True))],
         8000, [("x", "10.0.0.1:8000", 2)]),
        ([endpoint_slice("a", "d", {"addresses": ["10.0.0.7"]})], 8000, [("", "10.0.0.7:8000", 0)]),
    ],
    ids=["none", "no such port", "a named port per slice", "both families", "moving between slices", "without a pod"],
)  # fmt: skip
def test_servers_of_slices(told, port, servers):
    """One per pod, whatever number of slices tell of it."""
    found = of_slices(slices(*told), port)
    assert [(one.pod, one.address, one.condition) for one in found] == servers


async def test_a_server_that_two_entries_name():
    """It belongs to the first; two servers in one pod are two instances."""
    api = FakeKubernetes()
    api.put(pod("x", labels="app=vllm,tier=1"))
    entries = [
        {"selector": "app=vllm", "port": 8000, "role": "decode"},
        {"selector": "tier=1", "port": 8000, "role": "prefill"},
        {"selector": "tier=1", "port": 8001, "role": "prefill"},
    ]
    async with watching(api, pods=entries) as fleet:
        await fleet.until(lambda seen: len(seen) == 2)
        assert [(i.id, i.role) for i in fleet.seen.values()] == [("x", Role.DECODE), ("x:8001", Role.PREFILL)]


@pytest.mark.parametrize("how", ["the watch ends", "resync"])
async def test_c01_a_delete_that_the_watch_missed(how):
    """The next list shows it: at once after a watch that ended, and within resync_s while one stays open."""
    api = FakeKubernetes()
    api.put(pod("a", ip="10.0.0.9"))
    api.put(pod("b"))
    async with watching(api, resync_s=0.3 if how == "resync" else 60) as fleet:
        await fleet.until(lambda seen: len(seen) == 2 and api.watches == 1)
        api.delete(PODS, "b", told=False)
        if how == "the watch ends":
            api.end_watches()
        await fleet.until(lambda seen: list(seen) == ["a"])


async def test_a_resync_leaves_no_watch_behind():
    """One connection per entry, however long the router runs."""
    api = FakeKubernetes()
    async with watching(api, resync_s=0.05):
        async with asyncio.timeout(10):
            while api.lists < 8 or api.watches > 1:  # noqa: ASYNC110 - the source's own tasks move it
                await asyncio.sleep(0.001)
        assert api.most_watches <= 2


async def test_an_api_server_that_never_answers(caplog):
    """It is away, and said to be."""
    api = FakeKubernetes()
    api.put(pod("a"))
    async with watching(api, resync_s=0.3) as fleet:
        await fleet.until(lambda seen: list(seen) == ["a"])
        api.hangs = True
        async with asyncio.timeout(5):
            while not caplog.records:  # noqa: ASYNC110 - the log has no event
                await asyncio.sleep(0.01)
        assert "did not answer within 0.3 s" in caplog.records[0].message
        assert list(fleet.seen) == ["a"]


@pytest.mark.parametrize("expired", ["event", "status"])
async def test_a_version_that_is_forgotten(expired, caplog):
    """410 Gone, in either of its shapes: what is new shows in the next list, and nobody is alarmed."""
    api = FakeKubernetes(expired=expired)
    api.put(pod("a"))
    async with watching(api) as fleet:
        await fleet.until(lambda seen: list(seen) == ["a"])
        api.put(pod("b", ip="10.0.0.2"))
        await fleet.until(lambda seen: len(seen) == 2)
        assert api.lists > 1
    assert caplog.records == []


async def test_the_last_fleet_stays_while_the_api_server_is_away(caplog):
    """Said once, however often it is tried; what happened meanwhile shows when it is back."""
    api = FakeKubernetes()
    api.put(pod("a"))
    caplog.set_level(logging.INFO)
    async with serving(api):
        fleet, port = Watching(source(api)), api.port
        await fleet.until(lambda seen: list(seen) == ["a"])
    await asyncio.sleep(0.3)  # some sixty attempts
    assert (len(fleet.snapshots), list(fleet.seen)) == (1, ["a"])
    said = [record.message for record in caplog.records if record.name.startswith("disagg_router")]
    assert len(said) == 1
    assert "does not answer" in said[0]
    assert "what is known of pods app=vllm stays in force" in said[0]
    api.put(pod("b", ip="10.0.0.2"))
    async with serving(api, port):
        await fleet.until(lambda seen: len(seen) == 2)
        await fleet.close()
    assert any("tells of pods app=vllm again" in record.message for record in caplog.records)


async def test_a_router_that_may_not_read_pods(caplog):
    """The API server's words, and what to do; other entries go on."""
    api = FakeKubernetes(refuse=403)
    async with watching(api):
        async with asyncio.timeout(5):
            while not caplog.records:  # noqa: ASYNC110 - the log has no event
                await asyncio.sleep(0.01)
    assert "refuses /api/v1/namespaces/ai/pods: 403 pods is forbidden" in caplog.records[0].message
    assert "let the router's service account get, list and watch it" in caplog.records[0].message


async def test_a_selector_that_matches_nothing_is_said(caplog):
    """An empty fleet is more often a typing error than a wish."""
    api = FakeKubernetes()
    async with watching(api) as fleet:
        await fleet.until(lambda seen: seen == {})
        api.end_watches()
        api.put(pod("a"))
        await fleet.until(lambda seen: list(seen) == ["a"])
    said = [record.message for record in caplog.records]
    assert said == ["no server is known by pods app=vllm in namespace ai: if it has pods, see the name and the port"]


async def test_the_token_is_read_again(tmp_path):
    """The kubelet replaces it within the hour; the old one is then refused."""
    token = tmp_path / "token"
    token.write_text("first\n")
    api = FakeKubernetes(token="first")
    api.put(pod("a"))
    async with watching(api, token_file=token) as fleet:
        await fleet.until(lambda seen: list(seen) == ["a"])
        api.token = "second"
        token.write_text("second\n")
        api.put(pod("b", ip="10.0.0.2"), told=False)
        api.end_watches()
        await fleet.until(lambda seen: len(seen) == 2)


@pytest.fixture
def certificates(tmp_path):
    """Name -> (key file, certificate file), each its own authority."""
    made = {name: (str(tmp_path / f"{name}.key"), str(tmp_path / f"{name}.pem")) for name in ("ours", "theirs")}
    for name, (key, certificate) in made.items():
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return made


async def test_the_api_servers_certificate_is_checked(certificates, caplog):
    """Against ca_file, which is how a pod knows its cluster; with another one nothing is sent."""
    api = FakeKubernetes()
    api.put(pod("a"))
    settings = KubernetesConfig.model_validate(VLLM)
    async with serving(api, ssl_keyfile=certificates["ours"][0], ssl_certfile=certificates["ours"][1]):
        fleets = []
        for name in ("theirs", "ours"):
            access = Access(f"https://127.0.0.1:{api.port}", "ai", None, Path(certificates[name][1]))
            build = KubernetesSource(
                settings, lambda access=access: KubernetesApi(access), lambda _: FINGERPRINT, _Hasty(), random.Random(1)
            )
            fleets.append(Watching(build))
        await fleets[1].until(lambda seen: list(seen) == ["a"])
        for fleet in fleets:
            await fleet.close()
    assert fleets[0].snapshots == []
    assert "does not answer (ConnectError: [SSL: CERTIFICATE_VERIFY_FAILED]" in caplog.records[0].message


async def test_attempts_are_spaced():
    """Doubling up to about 25 s, so that an API server in trouble is not pressed further."""
    waits = []

    class Clock(MonotonicClock):
        async def sleep(self, seconds):
            waits.append(seconds)
            if len(waits) == 400:
                raise ConnectionAbortedError

    settings = KubernetesConfig.model_validate(VLLM)
    access = Access("http://127.0.0.1:9", "ai", None, None)
    build = KubernetesSource(settings, lambda: KubernetesApi(access), lambda _: FINGERPRINT, Clock(), random.Random(1))
    with pytest.raises(ConnectionAbortedError):
        async with asyncio.timeout(30):
            await anext(build.watch())
    assert 0.2 <= waits[0] <= 0.4
    assert 12.8 <= min(waits[7:]) <= max(waits) <= 25.6


# --- where it runs ------------------------------------------------------------------------------------------------

IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


@pytest.fixture
def account(tmp_path):
    (tmp_path / "namespace").write_text("ai\n")
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "environ", "url", "namespace", "token"),
    [
        ({}, IN_POD, "https://10.96.0.1:6443", "ai", "token"),
        ({"namespace": "other"}, {"KUBERNETES_SERVICE_HOST": "fd00::1"}, "https://[fd00::1]:443", "other", "token"),
        ({"api": "http://127.0.0.1:8001"}, IN_POD, "http://127.0.0.1:8001", "ai", None),
        ({"api": "https://k:6443", "token_file": "/t"}, IN_POD, "https://k:6443", "ai", "/t"),
    ],
    ids=["in a pod", "IPv6", "kubectl proxy", "named"],
)
def test_where_the_api_server_is(account, settings, environ, url, namespace, token):
    """The pod's own account, which is never shown to a server that the settings name."""
    found = find_access(KubernetesConfig.model_validate(VLLM | settings), environ, account)
    assert (found.url, found.namespace) == (url, namespace)
    assert found.token_file == (account / token if token else None)  # joining an absolute path yields that path


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "fleet.kubernetes.namespace is missing, and this is no pod"),
        ({"namespace": "ai"}, "fleet.kubernetes.api is missing, and this is no pod"),
    ],
)
def test_outside_a_cluster(tmp_path, settings, says):
    """One sentence that names the key to add."""
    with pytest.raises(ConfigError, match=says):
        find_access(KubernetesConfig.model_validate(VLLM | settings), {}, tmp_path)


async def test_slices_are_watched_too():
    """A pod that leaves a Service's slice leaves the fleet; one that terminates there drains first."""
    api = FakeKubernetes()
    api.put(endpoint_slice("s", "d", endpoint("x", "10.0.0.1"), endpoint("y", "10.0.0.2")))
    async with watching(api, services=[{"name": "d", "port": 8000, "role": "decode"}]) as fleet:
        await fleet.until(lambda seen: list(seen) == ["x", "y"])
        api.put(endpoint_slice("s", "d", endpoint("x", "10.0.0.1"), endpoint("y", "10.0.0.2", terminating=True)))
        await fleet.until(lambda seen: seen["y"].state is DRAINING)
        api.put(endpoint_slice("s", "d", endpoint("x", "10.0.0.1")))
        await fleet.until(lambda seen: list(seen) == ["x"])
        api.delete(SLICES, "s")
        await fleet.until(lambda seen: seen == {})
