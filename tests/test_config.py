"""The cluster file: what is accepted, and the one sentence for what is not."""

from __future__ import annotations

import os
import sys

import pytest

from disagg_router.config import http_url, load_config
from disagg_router.controller.cluster import check_launchable, cluster_id, instance_specs
from disagg_router.errors import ConfigError
from disagg_router.model import Role

WHOLE = """
model: {path: ./model, served_name: tiny, revision: null}
engine: {device: cpu, python: null, cpus: auto, args: {max-model-len: 8192, block-size: 32}, env: {A: b}}
connector: {name: nixl, kv_load_failure_policy: recompute, lease_s: 30}
pools:
  prefill: {instances: 1, gpus: 0, args: {max-num-seqs: 4}, labels: {}}
  decode: {instances: 2, gpus: 0, args: {}, labels: {zone: a}}
router:
  workers: 1
  policy: {name: threshold, tokens: 256}
  admission: {queue: 1024, max_wait_s: 30}
  slo: {ttft_ms: 2000, tpot_ms: 100, max_gap_ms: 500}
  stream_resume: true
  allow_path_override: false
limits: {body_mb: 64, first_byte_s: 120, idle_s: 60}
"""


@pytest.fixture
def load(tmp_path):
    def load(text: str):
        path = tmp_path / "cluster.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path)

    return load


def test_the_whole_file_as_documented(load, tmp_path):
    """Relative paths start at the file's folder; a pool's args are laid over the engine's."""
    config = load(WHOLE)
    assert config.model.path == str(tmp_path / "model")
    specs = {str(spec.id): spec for spec in instance_specs(config, "c")}
    assert sorted(specs) == ["decode-0", "decode-1", "prefill-0"]
    assert specs["prefill-0"].args == {"max-model-len": 8192, "block-size": 32, "max-num-seqs": 4}
    assert specs["decode-1"].labels == {"zone": "a"}
    assert specs["decode-0"].env == {"A": "b"}
    assert specs["decode-0"].python == sys.executable
    assert sorted(spec.index for spec in specs.values()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {served_name: t}\nroutr: {}", "unknown key 'routr': did you mean 'router'"),
        ("model: {served_name: t, pth: x}", "unknown key 'model.pth': did you mean 'path'"),
        ("model: {served_name: t}\nrouter: {admision: {}}", "unknown key 'router.admision': did you mean 'admission'"),
        ("model: {served_name: t}\nrouter: {slo: {ttft: 3}}", "unknown key 'router.slo.ttft': did you mean 'ttft_ms'"),
        ("model: {served_name: t}\npools: {prefil: {instances: 1}}", "pools.prefil"),
        ("model: {served_name: t}\npools: {decode: {instances: 0}}", "pools.decode.instances"),
        ("model: {served_name: t}\npools: {decode: {}}", "pools.decode.instances is missing"),
        ("model: {path: x}", "model.served_name is missing"),
        ("pools: {}", "model is missing"),
        ("model: {served_name: t}\nfleet: {static: []}", "fleet.static"),
        ("model: {served_name: t}\nfleet: {static: [{url: 'localhost:1', role: decode}]}", "must look like http"),
        (
            "model: {served_name: t}\nfleet: {static: [{url: 'http://h:1', rol: decode}]}",
            "unknown key 'fleet.static.0.rol': did you mean 'role'",
        ),
        (
            "model: {served_name: t}\nfleet: {file: a, controller: 'http://h:1'}",
            "exactly one of controller, static, file",
        ),
        ("model: {served_name: t}\nfleet: nowhere", "fleet: input should be a valid dictionary"),
        ("model: {served_name: t}\nfleet: {}", "exactly one of controller, static, file"),
        ("model: {served_name: t}\nfleet: {controller: null}", "exactly one of controller, static, file"),
        ("model: {served_name: t}\nfleet: {static: null}", "exactly one of controller, static, file"),
        ("model: {served_name: t}\nfleet: {file: null}", "exactly one of controller, static, file"),
        ("model: {served_name: t}\nfleet: {kubernetes: {}}", "fleet.kubernetes: names no services and no pods"),
        (
            "model: {served_name: t}\nfleet: {kubernetes: {services: [{name: d, prot: 80, role: decode}]}}",
            "unknown key 'fleet.kubernetes.services.0.prot': did you mean 'port'",
        ),
        (
            "model: {served_name: t}\nfleet: {kubernetes: {pods: [{selector: '', port: 80, role: decode}]}}",
            "selector: '' must look like key=value",
        ),
        (
            "model: {served_name: t}\nfleet: {kubernetes: {pods: [{selector: a=b, port: http, role: decode}]}}",
            "fleet.kubernetes.pods.0.port: input should be a valid integer",
        ),
        (
            "model: {served_name: t}\n"
            "fleet: {kubernetes: {token_file: t, pods: [{selector: a=b, port: 1, role: decode}]}}",
            "has a token_file or ca_file but no api",
        ),
        ("model: {served_name: t}\nrouter: {admin_token: ''}", "router.admin_token: string should have at least 1"),
        ("model: {served_name: t}\nmodel: {served_name: u}", "the key 'model' stands twice"),
        ("model: {served_name: t}\nlimits: {idle_s: -1}", "limits.idle_s"),
        ("a: [", "is not valid YAML"),
        ("- a", "must be a mapping"),
        ("", "must be a mapping"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_key(load, text, says):
    """On one line, and never a traceback."""
    with pytest.raises(ConfigError, match=says) as caught:
        load(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "localhost:1",
            "ftp://h:1",
            "http://",
            "http://:1",
            "http://h:",
            "http://h:x",
            "http://h:0",
            "http://h:65536",
        ),
        *(
            "http://h:-1",
            "http://[::1:1",
            "http://u@h:1",
            "http://u:p@h:1",
            "http://h:1/v1",
            "http://h:1?",
            "http://h:1#",
        ),
        *(
            "http://h:1?a=b",
            "http://h:1#a",
            " http://h:1",
            "http://h:1 ",
            "http://h h:1",
            "http://h\n:1",
            "http://h\t:1",
        ),
    ],
)
def test_what_is_no_url_of_a_server(url):
    """Found where it is read, not by an HTTP client minutes later."""
    with pytest.raises(ValueError, match="must look like http://HOST:PORT"):
        http_url(url)


@pytest.mark.parametrize("url", ["http://h:1", "https://h", "http://127.0.0.1:65535", "http://[::1]:1"])
def test_what_is_one(url):
    """With or without the last slash, which goes."""
    assert (http_url(url), http_url(f"{url}/")) == (url, url)


def test_a_missing_file_and_a_binary_file_are_named(tmp_path):
    """Wrong paths are the most common mistake of all."""
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "binary")


def launchable(load, tmp_path, **changes: tuple[str, str]):
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    text = WHOLE
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    check_launchable(load(text))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("./model", "./modle", r"model.path .*modle is not a model folder"),
        ("path: ./model, ", "", "model.path is missing"),
        ("python: null", "python: /no/such/python", "engine.python /no/such/python is not an executable"),
        ("decode:", "prefill2:", "pools.prefill2"),
        ("device: cpu", "device: cuda", r"pools\.(prefill|decode)\.gpus is 0 but engine.device is cuda"),
        ("instances: 1, gpus: 0", "instances: 1, gpus: 1", "pools.prefill.gpus is 1 but engine.device is cpu"),
    ],
)
def test_what_cannot_be_launched_is_said_before_anything_starts(load, tmp_path, old, new, says):
    """Ray hangs on a python that is not there, an engine takes 20 s to say that its model is missing."""
    with pytest.raises(ConfigError, match=says):
        launchable(load, tmp_path, change=(old, new))


def test_a_prefill_pool_alone_cannot_be_launched(load, tmp_path):
    """Nothing would decode."""
    text = WHOLE[: WHOLE.index("  decode:")] + WHOLE[WHOLE.index("router:") :]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="nothing that decodes"):
        check_launchable(load(text))


def test_the_documented_file_can_be_launched(load, tmp_path):
    """No complaint about a good one."""
    launchable(load, tmp_path)


def test_a_kubernetes_fleet(load, tmp_path):
    """A quoted port is its number, a selector loses its spaces, files start at the config's folder."""
    fleet = load(
        "model: {served_name: t}\nfleet: {kubernetes: {api: 'https://k:6443', token_file: token, services: "
        "[{name: d, port: '8000', role: decode, args: {}}, {name: p, port: http, role: prefill}], "
        "pods: [{selector: 'a=b, c.io/d=e', port: 8000, role: unified}]}}"
    ).fleet.kubernetes
    assert [service.port for service in fleet.services] == [8000, "http"]
    assert fleet.pods[0].selector == "a=b,c.io/d=e"
    assert (fleet.token_file, fleet.ca_file, fleet.namespace) == (str(tmp_path / "token"), None, None)


def test_a_cluster_is_named_by_its_file(tmp_path, monkeypatch):
    """However the path is written, and two files never share a name."""
    (tmp_path / "a.yaml").touch()
    (tmp_path / "b.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert cluster_id("a.yaml") == cluster_id(os.path.join(str(tmp_path), ".", "a.yaml"))
    assert cluster_id("a.yaml") != cluster_id("b.yaml")


def test_roles_are_the_only_pools():
    """The role's name is the pool's name."""
    assert [role.value for role in Role] == ["prefill", "decode", "unified"]


@pytest.mark.parametrize(
    ("in_file", "in_environment", "in_force"),
    [(None, "e", "e"), ("f", "e", "f"), ("f", "", "f"), (None, "", None)],
)
def test_the_admin_token_may_stand_in_the_environment(tmp_path, in_file, in_environment, in_force):
    """A ConfigMap is for everybody to read; what the file says goes first."""
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: {{served_name: m}}\nrouter: {{admin_token: {in_file or 'null'}}}\n", encoding="utf-8")
    config = load_config(file, {"DISAGG_ROUTER_ADMIN_TOKEN": in_environment})
    assert config.router.admin_token == in_force
