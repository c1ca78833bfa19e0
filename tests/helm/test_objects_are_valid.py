"""Every object against Kubernetes' own schemas, and the custom ones against their definitions."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from kubernetes_validate.utils import SchemaNotFoundError

from tests.helm.chart import CHART, ROOT, WORLDS, Doc, documents, merged, run

pytestmark = pytest.mark.helm

CRDS = ROOT.parent / "shared" / "crds"
KUBE_VERSIONS = ("1.29", "1.33", "1.37")
CUSTOM = {"RayCluster", "HTTPRoute", "ServiceMonitor", "PodMonitor"}
ALWAYS = Counter(ConfigMap=1, Secret=1, ServiceAccount=1, Pod=1)
RAY_NETWORK = Counter(NetworkPolicy=3, Service=3)
KINDS = {
    "defaults": ALWAYS + RAY_NETWORK + Counter(Deployment=4, PodDisruptionBudget=1),
    "cpu": ALWAYS + RAY_NETWORK + Counter(Deployment=4, PodDisruptionBudget=1),
    "unified": ALWAYS + RAY_NETWORK + Counter(Deployment=3, PodDisruptionBudget=1),
    "one-node": ALWAYS + RAY_NETWORK + Counter(Deployment=4, PodDisruptionBudget=1),
    "everything": ALWAYS
    + RAY_NETWORK
    + Counter(Deployment=4, PodDisruptionBudget=1, HorizontalPodAutoscaler=1, PersistentVolumeClaim=1, Ingress=1)
    + Counter(HTTPRoute=1, ServiceMonitor=1, PodMonitor=1),
    "everything-kuberay": ALWAYS
    + RAY_NETWORK
    + Counter(Deployment=1, RayCluster=1, PodDisruptionBudget=1, HorizontalPodAutoscaler=1, PersistentVolumeClaim=1)
    + Counter(Ingress=1, HTTPRoute=1, ServiceMonitor=1, PodMonitor=1),
    "two-by-two-rdma": ALWAYS
    + RAY_NETWORK
    + Counter(Deployment=1, RayCluster=1, PodDisruptionBudget=1, HorizontalPodAutoscaler=1)
    + Counter(HTTPRoute=1, ServiceMonitor=1, PodMonitor=1),
    "proxy-only": ALWAYS
    + Counter(Deployment=1, Service=2, NetworkPolicy=1, PodDisruptionBudget=1, Role=1, RoleBinding=1, Ingress=1),
}


@pytest.mark.parametrize("kube_version", KUBE_VERSIONS)
@pytest.mark.parametrize("world", WORLDS)
def test_kubernetes_takes_every_object(world: str, kube_version: str) -> None:
    """No unknown field, no wrong type; and the objects are those that are meant: an unknown kind is not checked."""
    docs = documents(WORLDS[world], kube_version)
    assert Counter(doc["kind"] for doc in docs) == KINDS[world]
    for doc in docs:
        if doc["kind"] not in CUSTOM:
            kubernetes_validate.validate(doc, kube_version, strict=True)


def test_an_unknown_field_would_be_found() -> None:
    """The check itself checks."""
    doc = documents({})[0]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(merged(doc, {"spec": {"podSelektor": {}}}), "1.33", strict=True)
    with pytest.raises(SchemaNotFoundError):
        kubernetes_validate.validate({**doc, "kind": "NoSuchKind"}, "1.33", strict=True)


@pytest.mark.parametrize("world", ["everything", "everything-kuberay", "two-by-two-rdma"])
def test_custom_objects_match_their_definitions(world: str) -> None:
    """RayCluster, HTTPRoute and the monitors, with unknown fields refused."""
    custom = [doc for doc in documents(WORLDS[world]) if doc["kind"] in CUSTOM]
    assert custom
    for doc in custom:
        definition(doc).validate(doc)


def test_an_unknown_field_of_a_custom_object_would_be_found() -> None:
    """The check itself checks."""
    [ray] = [doc for doc in documents(WORLDS["everything-kuberay"]) if doc["kind"] == "RayCluster"]
    ray["spec"]["workerGroupSpecs"][0]["replicaz"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replicaz"):
        definition(ray).validate(ray)


def definition(doc: Doc) -> jsonschema.Draft202012Validator:
    group, version = doc["apiVersion"].split("/")
    file = CRDS / f"{doc['kind'].lower()}_{group}_{version}.json"
    if not file.is_file():
        pytest.skip(f"no schema of {doc['kind']} beside this checkout (shared/crds): not checked")
    return load(str(file))


@cache
def load(file: str) -> jsonschema.Draft202012Validator:
    with open(file, encoding="utf-8") as text:
        return jsonschema.Draft202012Validator(strict(json.load(text)))


def strict(schema: Any) -> Any:
    """A definition that refuses what it does not name, as server-side field validation does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
        if "apiVersion" in schema["properties"] or {"spec"} <= schema["properties"].keys():  # the object itself
            found["properties"] = {"apiVersion": {}, "kind": {}, "metadata": {}} | found["properties"]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_the_worlds_lint(world: str) -> None:
    """helm's own opinion of every way to use the chart."""
    assert run("lint", "--strict", str(CHART), values=WORLDS[world]).returncode == 0


def test_selectors_find_their_pods_and_services() -> None:
    """Every selector of a Service, a policy, a budget or a monitor matches something that the chart makes."""
    docs = documents(WORLDS["everything-kuberay"])
    labels = [doc["metadata"]["labels"] for doc in docs]
    for doc in docs:
        if doc["kind"] == "Deployment":
            labels.append(doc["spec"]["template"]["metadata"]["labels"])
        if doc["kind"] == "RayCluster":
            groups = [doc["spec"]["headGroupSpec"], *doc["spec"]["workerGroupSpecs"]]
            labels += [group["template"]["metadata"]["labels"] for group in groups]
    selectors = list(matchers(docs))
    assert len(selectors) > 10
    for selector in selectors:
        assert any(selector.items() <= found.items() for found in labels), selector


def matchers(node: Any) -> Any:
    if isinstance(node, list):
        for part in node:
            yield from matchers(part)
    elif isinstance(node, dict):
        if node.get("kind") == "Service":
            yield node["spec"]["selector"]
        found = node.get("matchLabels")
        if found and "app.kubernetes.io/instance" in found:
            yield found
        yield from matchers(list(node.values()))
