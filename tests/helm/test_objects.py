"""What the objects hold: facts that a cluster would otherwise teach."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.helm.chart import (
    EVERYTHING,
    TOKENS,
    UNIFIED,
    WORLDS,
    Doc,
    container,
    documents,
    example,
    merged,
    one,
    pods,
)

pytestmark = pytest.mark.helm

RDMA = example("two-by-two-rdma.yaml")
PROXY = example("proxy-only.yaml")


def env(template: Doc) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(template)["env"]}


# --- probes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pools_startup_probe_has_half_an_hour_and_can_be_set(role: str) -> None:
    """C09: a slow start is not a dead engine."""
    default = container(pods(documents({}))[role])["startupProbe"]
    assert default["failureThreshold"] * default["periodSeconds"] >= 1800
    set_ = merged({}, {"poolDefaults": {"startupProbe": {"failureThreshold": 999, "periodSeconds": 7}}})
    probe = container(pods(documents(set_))[role])["startupProbe"]
    assert (probe["failureThreshold"], probe["periodSeconds"]) == (999, 7)


@pytest.mark.parametrize("name", ["router", "head", "prefill", "decode"])
def test_liveness_is_patient(name: str) -> None:
    """C09: three misses of five seconds at least, and never a question about engines."""
    probe = container(pods(documents({}))[name])["livenessProbe"]
    assert probe["failureThreshold"] >= 3
    assert probe["timeoutSeconds"] >= 5
    assert probe["httpGet"]["path"] in ("/health", "/api/local_raylet_healthz")


def test_the_router_is_ready_only_with_engines() -> None:
    """/health answers without any, /ready does not."""
    router = container(pods(documents({}))["router"])
    assert router["livenessProbe"]["httpGet"]["path"] == "/health"
    assert router["readinessProbe"]["httpGet"]["path"] == "/ready"


# --- stopping --------------------------------------------------------------------------------------------------------


def test_a_router_has_time_to_drain() -> None:
    """C23: out of the load balancers first, then the drain, all before the kill."""
    docs = documents({"config": {"limits": {"drain_s": 300}}, "router": {"terminationGracePeriodSeconds": 320}})
    template = pods(docs)["router"]
    assert container(template)["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "10"]}}
    assert template["spec"]["terminationGracePeriodSeconds"] == 320
    assert one(docs, "Deployment", "-router")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_replicas_are_the_autoscalers_when_it_is_on() -> None:
    """A deployment that names a number would fight it at every upgrade."""
    docs = documents({"router": {"autoscaling": {"enabled": True}}})
    assert "replicas" not in one(docs, "Deployment", "-router")["spec"]
    assert one(docs, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "r-disagg-router-router"


# --- security --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_no_pod_runs_with_more_than_it_needs(world: str) -> None:
    """Not root, nothing written to the image, no capability but the one that RDMA needs, no API token without a use."""
    docs = documents(WORLDS[world])
    found = {**pods(docs), "test": one(docs, "Pod")}
    for name, template in found.items():
        spec, own = template["spec"], container(template)["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
        assert own["capabilities"]["drop"] == ["ALL"]
        assert set(own["capabilities"].get("add", [])) <= {"IPC_LOCK"}
        assert spec["automountServiceAccountToken"] == (world == "proxy-only" and name == "router")


def test_ray_wants_its_token_everywhere() -> None:
    """The operator's own checks get it too, from the same Secret."""
    docs = documents(merged(RDMA, {"secrets": TOKENS}))
    for name in ("head", "prefill", "decode"):
        found = env(pods(docs)[name])
        assert found["RAY_AUTH_MODE"] == "token"
        assert found["RAY_AUTH_TOKEN"]["secretKeyRef"] == {"name": "r-disagg-router", "key": "auth_token"}
    assert one(docs, "RayCluster")["spec"]["authOptions"] == {"mode": "token", "secretName": "r-disagg-router"}
    assert base64.b64decode(one(docs, "Secret")["data"]["auth_token"]).decode() == TOKENS["rayToken"]


def test_made_up_tokens_are_long_and_each_its_own() -> None:
    """Nobody has to think of one."""
    data = one(documents({}), "Secret")["data"]
    assert {len(base64.b64decode(token)) for token in data.values()} == {64}
    assert data["auth_token"] != data["admin_token"]


def test_an_existing_secret_takes_the_place_of_ours() -> None:
    """For GitOps, where the chart cannot see what it made up before."""
    docs = documents({"secrets": {"existing": "mine"}})
    assert not [doc for doc in docs if doc["kind"] == "Secret"]
    assert env(pods(docs)["router"])["DISAGG_ROUTER_ADMIN_TOKEN"]["secretKeyRef"]["name"] == "mine"


def test_no_token_stands_in_the_config() -> None:
    """A ConfigMap is for everybody to read."""
    assert "token" not in one(documents(EVERYTHING), "ConfigMap")["data"]["cluster.yaml"]


@pytest.mark.parametrize(
    ("fleet", "rules"),
    [
        ({"services": [{"name": "a", "port": 8000, "role": "decode"}]}, [("discovery.k8s.io", "endpointslices")]),
        ({"pods": [{"selector": "a=b", "port": 8000, "role": "decode"}]}, [("", "pods")]),
    ],
)
def test_the_account_may_do_just_what_its_fleet_needs(fleet: dict[str, Any], rules: list[tuple[str, str]]) -> None:
    """Reading, in the one namespace, and only what is looked at."""
    values = {"mode": "proxy", "config": {"pools": None, "fleet": {"kubernetes": {"namespace": "models", **fleet}}}}
    docs = documents(values)
    role, binding = one(docs, "Role"), one(docs, "RoleBinding")
    assert [(r["apiGroups"][0], r["resources"][0]) for r in role["rules"]] == rules
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "models"
    assert binding["subjects"][0]["namespace"] == "ns"


def test_only_the_router_and_its_like_reach_an_engine() -> None:
    """C35: engines and side channels are open to no one else, and engines to no cloud metadata."""
    policy = one(documents({}), "NetworkPolicy", "-engine")["spec"]
    inside, from_router, metrics = policy["ingress"]
    components = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in inside["from"]]
    assert components == ["engine", "head"]
    assert from_router["ports"] == [{"port": 20000, "endPort": 29999}]
    assert from_router["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    assert metrics["ports"] == [{"port": "metrics"}]
    assert "169.254.169.254/32" in policy["egress"][0]["to"][1]["ipBlock"]["except"]


def test_the_public_service_leads_nowhere_near_the_admin_listener() -> None:
    """C35: two Services, and no Ingress or route names the second."""
    docs = documents(EVERYTHING)
    assert [port["name"] for port in one(docs, "Service", "disagg-router")["spec"]["ports"]] == ["http"]
    assert one(docs, "HTTPRoute")["spec"]["rules"][0]["backendRefs"] == [{"name": "r-disagg-router", "port": 80}]
    assert one(docs, "Service", "-admin")["spec"]["clusterIP"] == "None"


# --- GPUs and networks -----------------------------------------------------------------------------------------------


def test_an_rdma_pod_gets_all_that_it_asks_for() -> None:
    """GPUs and RDMA devices by their vendors' names, as strings; memory for /dev/shm; the right to lock memory."""
    template = pods(documents(RDMA))["decode"]
    engine = container(template)
    devices = {"nvidia.com/gpu": "8", "rdma/ib": "8"}
    assert devices.items() <= engine["resources"]["limits"].items()
    assert devices.items() <= engine["resources"]["requests"].items()
    assert engine["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "128Gi"}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "models"}
    [spread] = template["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"]["disagg-router/pool"] == "decode"


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ({}, {"emptyDir": {"sizeLimit": "200Gi"}}),
        ({"cacheVolume": {"create": True}}, {"persistentVolumeClaim": {"claimName": "r-disagg-router-cache"}}),
        ({"pools": {"decode": {"cache": {"claim": "mine"}}}}, {"persistentVolumeClaim": {"claimName": "mine"}}),
        # Not made by kubelet: it would belong to root, and the engine could not write to it.
        ({"pools": {"decode": {"cache": {"hostPath": "/m"}}}}, {"hostPath": {"path": "/m", "type": "Directory"}}),
    ],
)
def test_where_models_are_kept(values: dict[str, Any], source: dict[str, Any]) -> None:
    """Fetched by every new pod, or kept in a volume or on the node."""
    template = pods(documents(values))["decode"]
    assert {"name": "cache", **source} in template["spec"]["volumes"]
    assert env(template)["HF_HOME"] == "/cache/huggingface"


@pytest.mark.parametrize("resource", ["amd.com/gpu", "nvidia.com/mig-3g.40gb"])
def test_another_vendors_gpu(resource: str) -> None:
    """Per pool."""
    found = pods(documents({"pools": {"decode": {"gpuResource": resource}}}))
    assert container(found["decode"])["resources"]["limits"][resource] == "1"
    assert container(found["prefill"])["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_host_network() -> None:
    """Names still resolve, and two such pods never share a node: they would share Ray's ports."""
    template = pods(documents(EVERYTHING))["prefill"]
    assert (template["spec"]["hostNetwork"], template["spec"]["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert {port["containerPort"] for port in container(template)["ports"]} == {52365, 8080}
    policy = one(documents(EVERYTHING), "NetworkPolicy", "-head")["spec"]
    assert {"ipBlock": {"cidr": "10.0.0.0/8"}} in policy["ingress"][0]["from"]


def test_a_cpu_pod_asks_for_no_gpu() -> None:
    """And takes the CPU image."""
    engine = container(pods(documents(WORLDS["cpu"]))["decode"])
    assert not [name for name in engine["resources"]["limits"] if "gpu" in name]
    assert engine["image"] == "disagg-router:0.1.0-cpu"


@pytest.mark.parametrize(
    ("values", "images"),
    [
        (
            {},
            {
                "router": "disagg-router:0.1.0-router",
                "head": "disagg-router:0.1.0-router",
                "decode": "disagg-router:0.1.0-cuda",
            },
        ),
        ({"image": {"registry": "example.com/team", "tag": "7"}}, {"decode": "example.com/team/disagg-router:7-cuda"}),
        (
            {"pools": {"decode": {"image": "mine@sha256:0"}}},
            {"decode": "mine@sha256:0", "prefill": "disagg-router:0.1.0-cuda"},
        ),
    ],
)
def test_images(values: dict[str, Any], images: dict[str, str]) -> None:
    """The tag is the version of the package that the chart lies beside."""
    found = pods(documents(values))
    assert {name: container(found[name])["image"] for name in images} == images


def test_unified_pods_alone() -> None:
    """No prefill and no decode pods then."""
    assert set(pods(documents(UNIFIED))) == {"head", "router", "unified"}


# --- ways in ---------------------------------------------------------------------------------------------------------


def test_nothing_on_the_way_cuts_a_long_answer() -> None:
    """C06 and C20: no timeout on the route, a long one on the ingress, and the router's own limit on bodies."""
    docs = documents(merged(EVERYTHING, {"config": {"limits": {"body_mb": 200}}}))
    annotations = one(docs, "Ingress")["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/proxy-"
    shown = {key.removeprefix(prefix): value for key, value in annotations.items()}
    assert (shown["body-size"], shown["read-timeout"], shown["buffering"]) == ("200m", "3600", "off")
    assert one(docs, "HTTPRoute")["spec"]["rules"][0]["timeouts"] == {"request": "0s", "backendRequest": "0s"}


def test_proxy_mode_starts_no_engine() -> None:
    """The router finds what runs already."""
    docs = documents(PROXY)
    assert set(pods(docs)) == {"router"}
    assert not [word for word in container(pods(docs)["router"])["args"] if "controller" in word]


def test_metrics_are_read_with_the_admin_token() -> None:
    """From the Secret that the router has it from."""
    endpoint = one(documents(RDMA), "ServiceMonitor")["spec"]["endpoints"][0]
    assert endpoint["authorization"]["credentials"] == {"name": "r-disagg-router", "key": "admin_token"}
    assert one(documents(RDMA), "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"


def test_names_fit() -> None:
    """Kubernetes cuts none of them at 63 characters, however long the release's name is."""
    for doc in documents({"fullnameOverride": "x" * 53}):
        assert len(doc["metadata"]["name"]) <= 50
