"""Values: each does something, and what is wrong is refused with a sentence that says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, EVERYTHING, TOKENS, UNIFIED, Values, example, merged, refusal, rendered

pytestmark = pytest.mark.helm

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
PLAIN, KUBERAY = EVERYTHING, merged(EVERYTHING, {"mode": "kuberay"})
PROXY = merged(example("proxy-only.yaml"), {"secrets": TOKENS})
# Where a value does nothing in PLAIN: the values around it with which it does.
BARE = {"secrets": TOKENS}
ELSEWHERE: Mapping[str, Values] = {
    "kuberay": KUBERAY,
    "pools.unified": UNIFIED,
    **dict.fromkeys(("router.replicas", "serviceAccount.create"), BARE),
    **dict.fromkeys((f"poolDefaults.cache.{key}" for key in ("claim", "hostPath", "sizeLimit")), BARE),
}
# Values that are not free to be anything, or that hide others; each is changed alone.
OTHER: Mapping[str, Any] = {
    "mode": "kuberay",
    "nameOverride": "other",
    "fullnameOverride": "other",
    "image.registry": "example.com",
    "image.repository": "other",
    "image.tag": "other",
    "image.pullPolicy": "Always",
    "secrets.rayToken": "other",
    "secrets.adminToken": "other",
    "secrets.hfToken": "other",
    "serviceAccount.name": "other",
    "config.router.policy.name": "always_local",
    "config.router.admission.reject_below": 0.2,
    "config.connector.name": "other",
    "config.limits.body_mb": 100,
    "config.limits.first_byte_s": 200,
    "config.limits.idle_s": 100,
    "config.limits.unary_s": 1800,
    "config.limits.drain_s": 60,
    "config.engine.stop_grace_s": 2,
    "config.engine.device": "cpu",
    "router.service.type": "LoadBalancer",
    "router.preStopSeconds": 5,
    "router.autoscaling.minReplicas": 3,
    "router.autoscaling.maxReplicas": 5,
    "router.podDisruptionBudget.maxUnavailable": "10%",
    "router.terminationGracePeriodSeconds": 1000,
    "head.terminationGracePeriodSeconds": 1000,
    "poolDefaults.terminationGracePeriodSeconds": 1000,
    "poolDefaults.preStopSeconds": 3,
    "kuberay.upgradeStrategy": "None",
    "ingress.readTimeoutSeconds": 4000,
    "ingress.hosts": [{"host": "other.example.com", "paths": ["/v1"]}],
    **{f"pools.{role}": {"shmSize": "3Gi"} for role in ("prefill", "decode", "unified")},
}
TOGETHER: Mapping[str, Values] = {
    "config.engine.device": {"config": {"pools": {"prefill": {"gpus": 0}, "decode": {"gpus": 0}}}},
}
WORDS = ("Args", "Cidrs", "hostnames", "drop", "accessModes", "blockedEgress")  # lists of these hold plain words


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    else:
        yield ".".join(path), node


LEAVES = {path: value for path, value in leaves(DEFAULTS) if path != "secrets.existing"}  # it has a test of its own
ALONE = [p for p, v in LEAVES.items() if {p, p.split(".")[0]} & {*OTHER, *ELSEWHERE} or isinstance(v, bool)]


def at(path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    found: dict[str, Any] = {last: value}
    for key in reversed(parents):
        found = {key: found}
    return found


def unlike(path: str, number: int) -> Any:
    """Something else of the kind that stands at `path`, found again by its number."""
    value, mark = LEAVES[path], f"mark-{number}"
    if isinstance(value, int | float):
        return number
    if isinstance(value, list):
        return [mark] if path.endswith(WORDS) else [{"name": mark}]
    return {"name": mark} if isinstance(value, dict) else mark


@pytest.fixture(scope="module")
def all_changed() -> str:
    """Every value that is free to be anything, changed at once."""
    values = dict(PLAIN)
    for number, path in enumerate(LEAVES, 40000):
        if path not in ALONE:
            values = merged(values, at(path, unlike(path, number)))
    return rendered(values)


@pytest.mark.parametrize(("number", "path"), [(n, path) for n, path in enumerate(LEAVES, 40000) if path not in ALONE])
def test_every_free_value_shows(number: int, path: str, all_changed: str) -> None:
    """No value is read by nobody: what is written into it stands in some object."""
    assert re.search(rf"(?<!\d){number}(?!\d)", all_changed)


@pytest.mark.parametrize("path", ALONE)
def test_every_other_value_changes_something(path: str) -> None:
    """Switches and choices: the objects are others than before."""
    around = next((v for p, v in ELSEWHERE.items() if path == p or path.startswith(f"{p}.")), PLAIN)
    now = look_up(around, path)
    new = OTHER[path] if path in OTHER else not now if isinstance(now, bool) else unlike(path, 7)
    assert rendered(merged(merged(around, at(path, new)), TOGETHER.get(path, {}))) != rendered(around)


def look_up(values: Values, path: str) -> Any:
    """What is in force at `path` with these values."""
    node: Any = merged(DEFAULTS, values)
    for key in path.split("."):
        node = node[key]
    return node


SENTENCES = [
    (
        {"config": {"pools": {"decode": None}}},
        "config.pools has prefill but nothing that decodes: add config.pools.decode",
    ),
    (
        {"config": {"pools": {"prefill": None, "decode": None}}},
        "config.pools is empty: name prefill and decode, or unified",
    ),
    ({"config": {"connector": {"name": ""}}}, "config.connector.name is empty: name the connector"),
    (
        {"config": {"connector": {"name": ""}, "pools": {"prefill": None}}},
        "config.pools has decode but config.connector.name is empty: name the connector",
    ),
    (
        {"config": {"pools": {"decode": {"gpus": 0}}}},
        "config.pools.decode.gpus is 0 but config.engine.device is cuda: give",
    ),
    (
        {"config": {"engine": {"device": "cpu"}}},
        "config.pools.decode.gpus is 1 but config.engine.device is cpu: set gpus to 0",
    ),
    (
        {"router": {"terminationGracePeriodSeconds": 135}},
        "router.terminationGracePeriodSeconds is 135, which cuts the drain: make it more than preStopSeconds + "
        "config.limits.drain_s + 5 = 135",
    ),
    ({"config": {"limits": {"drain_s": 600}}}, "which cuts the drain: make it more than"),
    (
        {"head": {"terminationGracePeriodSeconds": 35}},
        "head.terminationGracePeriodSeconds is 35, which kills engines that are being stopped: make it more than "
        "config.engine.stop_grace_s + 30 = 35",
    ),
    (
        {"pools": {"decode": {"terminationGracePeriodSeconds": 13}}},
        "terminationGracePeriodSeconds of pool decode is 13, which kills an engine that is being stopped: make it",
    ),
    ({"mode": "proxy"}, "config.fleet is missing: in mode proxy name the vLLM servers"),
    (
        merged(example("proxy-only.yaml"), {"config": {"pools": {"decode": {"instances": 1}}}}),
        "config.pools asks for engines, which mode proxy does not start: set config.pools to null",
    ),
    (
        {"config": {"fleet": {"file": "fleet.yaml"}}},
        "config.fleet is only for mode proxy: in mode plain the router asks",
    ),
    (
        {"config": {"model": {"path": "/models/x"}}},
        "config.model.path /models/x is a folder, whose config.json the controller",
    ),
    (
        {"config": {"router": {"admin_token": "x"}}},
        "config.router.admin_token would stand readable in a ConfigMap: use secrets",
    ),
    (
        {"secrets": {"existing": "mine", "hfToken": "x"}},
        "secrets.existing names a Secret, so rayToken, adminToken and hfToken",
    ),
    (
        {"poolDefaults": {"hostNetwork": True}},
        "pool decode has hostNetwork, .* list the nodes' addresses in networkPolicy.node",
    ),
    ({"poolDefaults": {"cache": {"claim": "a", "hostPath": "/b"}}}, "has both a claim and a hostPath: remove one"),
    (
        {"pools": {"unified": {"shmSize": "1Gi"}}},
        "pools.unified has settings but config.pools has no unified: add it there",
    ),
    (
        {"router": {"autoscaling": {"enabled": True, "maxReplicas": 1}}},
        "minReplicas is more than maxReplicas: swap them",
    ),
    ({"ingress": {"enabled": True}}, "ingress.enabled is true but ingress.hosts is empty: name at least one host"),
    ({"httpRoute": {"enabled": True}}, "httpRoute.enabled is true but httpRoute.parentRefs is empty: name the Gateway"),
    (
        merged(example("proxy-only.yaml"), {"ingress": {"readTimeoutSeconds": 60}}),
        "ingress.readTimeoutSeconds is 60, below config.limits.first_byte_s = 120, so the proxy would cut answers",
    ),
]
MISTAKES = [
    ({"router": {"replicaz": 3}}, "at '/router': additional properties 'replicaz' not allowed"),
    ({"rooter": {}}, "additional properties 'rooter' not allowed"),
    ({"pools": {"decode": {"nodeSelectr": {}}}}, "at '/pools/decode': additional properties 'nodeSelectr' not allowed"),
    ({"pools": {"decoder": {}}}, "at '/pools': additional properties 'decoder' not allowed"),
    ({"config": {"router": {"polcy": {}}}}, "at '/config/router': additional properties 'polcy' not allowed"),
    ({"config": {"pools": {"decoder": {"instances": 1}}}}, "must be one of 'prefill', 'decode', 'unified'"),
    ({"config": {"pools": {"decode": {"instances": 0}}}}, "at '/config/pools/decode/instances': exclusiveMinimum"),
    ({"config": {"fleet": {"kubernetez": {}}}}, "additional properties 'kubernetez' not allowed"),
    ({"mode": "operator"}, "at '/mode': value must be one of 'plain', 'kuberay', 'proxy'"),
    ({"router": {"replicas": "two"}}, "at '/router/replicas': got string, want integer"),
    ({"router": {"service": {"port": 0}}}, "at '/router/service/port': minimum: got 0, want 1"),
    ({"router": {"resources": {"limit": {}}}}, "at '/router/resources': additional properties 'limit' not allowed"),
    ({"poolDefaults": {"rdmaCount": 0}}, "at '/poolDefaults/rdmaCount': minimum: got 0, want 1"),
]


@pytest.mark.parametrize(("values", "says"), SENTENCES)
def test_a_contradiction_is_refused_with_a_sentence(values: Values, says: str) -> None:
    """Right alone, wrong together."""
    assert_says(refusal(values), says)


@pytest.mark.parametrize(("values", "says"), MISTAKES)
def test_a_mistake_is_refused_where_it_stands(values: Values, says: str) -> None:
    """Typos, wrong types and numbers out of range never reach the cluster."""
    assert_says(refusal(values), says)


def assert_says(said: str, wanted: str) -> None:
    first, *rest = wanted.split(".*")
    assert first in said
    assert all(part in said for part in rest), said


def test_null_removes_a_default() -> None:
    """How a pool of values.yaml is taken away."""
    assert (
        "prefill"
        not in yaml.safe_load(next(part for part in rendered(UNIFIED).split("---") if "cluster.yaml" in part))["data"][
            "cluster.yaml"
        ]
    )
