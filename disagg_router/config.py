"""YAML -> typed settings. One file shape for serve, controller, proxy and check-config.

Every mistake is a ConfigError of one sentence with the key's path in it; an unknown key names the nearest valid one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from disagg_router.errors import ConfigError
from disagg_router.model import Role, Slo
from disagg_router.yaml_file import read_yaml

ADMIN_TOKEN_VARIABLE = "DISAGG_ROUTER_ADMIN_TOKEN"  # the router's, where its file has none, and what `status` sends
ArgValue = str | int | float | bool | list[str | int | float] | dict[str, Any] | None


def http_url(value: str) -> str:
    """`value` without a trailing slash. Raises ValueError unless it is scheme://host[:port] and nothing more."""
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and parts.path in ("", "/") and not parts.netloc.endswith(":")
    except ValueError:  # the port is no number or above 65535, or a bracket is missing
        good = False
    # In the text itself: urlsplit drops tabs and newlines, and shows an empty query or fragment as none.
    if not good or re.search(r"[\s@?#]", value):
        raise ValueError(f"{value!r} must look like http://HOST:PORT")
    return value.rstrip("/")


def equality_selector(value: str) -> str:
    """A label selector without spaces. Raises ValueError unless it is key=value[,key=value...]: an empty one would
    match every pod of the namespace."""
    terms = [term.strip() for term in value.split(",")]
    if not all(re.fullmatch(r"[\w./-]+={1,2}[\w.-]*", term) for term in terms):
        raise ValueError(f"{value!r} must look like key=value or key=value,key=value")
    return ",".join(terms)


HttpUrl = Annotated[str, AfterValidator(http_url)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Strict):
    """What is served. `path` is a folder or a hub name and goes to the engine as it is; only a router in front of
    servers that somebody else runs can do without it."""

    path: str | None = None
    served_name: str
    revision: str | None = None


class EngineConfig(_Strict):
    """How every instance is started; a pool's own args and env are laid over these."""

    device: Literal["cpu", "cuda"] = "cuda"
    python: str | None = None  # None: the running interpreter
    cpus: Literal["auto"] | tuple[NonNegativeInt, ...] | None = "auto"
    args: dict[str, ArgValue] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    start_limit_s: PositiveFloat = 1800
    placement_limit_s: PositiveFloat = 60  # until Ray has a node for an instance; where nodes come late, make it longer
    stop_grace_s: PositiveFloat = 5


class ConnectorConfig(_Strict):
    name: str = "nixl"
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    lease_s: PositiveFloat = 30


class PoolConfig(_Strict):
    instances: PositiveInt
    gpus: NonNegativeInt = 0
    args: dict[str, ArgValue] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)


class PolicyConfig(BaseModel):
    """`name` picks the policy; every other key is that policy's own and is checked by it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "break_even"

    @property
    def options(self) -> Mapping[str, Any]:
        return self.model_extra or {}


class AdmissionConfig(_Strict):
    queue: PositiveInt = 1024  # requests that may wait for their first byte at once; one more is 429 queue_full
    max_wait_s: PositiveFloat = 30
    # A request whose predicted chance to meet its objectives is below this is refused early; null refuses none so.
    reject_below: Annotated[float, Field(ge=0, lt=1)] | None = 0.1


class SloConfig(_Strict):
    ttft_ms: PositiveFloat = 2000
    tpot_ms: PositiveFloat = 100
    max_gap_ms: PositiveFloat = 500

    def to_slo(self) -> Slo:
        return Slo(self.ttft_ms / 1000, self.tpot_ms / 1000, self.max_gap_ms / 1000)


class HealthConfig(_Strict):
    interval_s: PositiveFloat = 1.0
    timeout_s: PositiveFloat = 2.0
    pair_retest_s: PositiveFloat = 10.0  # a failed self-test is tried again after this long, doubling up to 10 times
    pair_test_limit_s: PositiveFloat = 90.0  # the first pull after a restart has been seen to take 53 s


class RouterConfig(_Strict):
    workers: Literal[1] = 1
    policy: PolicyConfig = PolicyConfig()
    admission: AdmissionConfig = AdmissionConfig()
    slo: SloConfig = SloConfig()
    health: HealthConfig = HealthConfig()
    index_entries: PositiveInt = 1_000_000  # blocks of all targets together that the prefix index remembers
    decision_log: str | None = None  # a file for one JSON line per request; nothing of a prompt is in it
    stream_resume: bool = True
    allow_path_override: bool = False
    admin_token: Annotated[str, Field(min_length=1)] | None = None


class LimitsConfig(_Strict):
    body_mb: PositiveFloat = 64
    connect_s: PositiveFloat = 5
    first_byte_s: PositiveFloat = 120
    idle_s: PositiveFloat = 60
    prefill_s: PositiveFloat = 120
    unary_s: PositiveFloat = 3600  # an unstreamed answer shows nothing before it is whole
    drain_s: PositiveFloat = 15


class StaticInstance(_Strict):
    """A vLLM server somebody else runs. `args`: the arguments it was started with, as far as they differ from
    engine.args; with neither given the router cannot know that two engines fit, and serves local only."""

    url: HttpUrl
    role: Role
    id: str | None = None
    args: dict[str, ArgValue] | None = None


Port = Annotated[int, Field(ge=1, le=65535)]
Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9.-]+$")]


class KubernetesService(_Strict):
    """The pods behind a Service. `port`: theirs, by number or by its name in the Service. `args`: StaticInstance's."""

    name: Name
    # A chart may quote every value: "8000" is the number.
    port: Annotated[Port | Name, Field(union_mode="left_to_right")]
    role: Role
    args: dict[str, ArgValue] | None = None


class KubernetesPods(_Strict):
    """The pods whose labels match `selector`. `args`: StaticInstance's."""

    selector: Annotated[str, AfterValidator(equality_selector)]
    port: Port
    role: Role
    args: dict[str, ArgValue] | None = None


class KubernetesConfig(_Strict):
    """vLLM servers in pods. A `namespace` of None is the router's own. `api` with its files is for a router outside the
    cluster; inside, the pod's service account says all three."""

    namespace: Name | None = None
    services: tuple[KubernetesService, ...] = ()
    pods: tuple[KubernetesPods, ...] = ()
    api: HttpUrl | None = None
    token_file: str | None = None
    ca_file: str | None = None
    resync_s: Annotated[float, Field(ge=1)] = 60.0  # a change that the watch missed is found out by then

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.services and not self.pods:
            raise ValueError("names no services and no pods: add at least one")
        if self.api is None and (self.token_file or self.ca_file):
            raise ValueError("has a token_file or ca_file but no api: name the API server that they are for")
        return self


class FleetConfig(_Strict):
    """Where a router finds its engines: exactly one of these."""

    controller: HttpUrl | None = None
    static: Annotated[list[StaticInstance], Field(min_length=1)] | None = None
    file: str | None = None
    kubernetes: KubernetesConfig | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        named, given = self.model_fields_set, [value for _, value in self if value is not None]
        if len(named) != 1 or len(given) != 1:
            raise ValueError(f"must hold exactly one of {', '.join(type(self).model_fields)}")
        return self


class ClusterConfig(_Strict):
    """The whole file."""

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    connector: ConnectorConfig = ConnectorConfig()
    pools: dict[Role, PoolConfig] = Field(default_factory=dict)
    fleet: FleetConfig | None = None
    router: RouterConfig = RouterConfig()
    limits: LimitsConfig = LimitsConfig()

    def slo(self) -> Slo:
        return self.router.slo.to_slo()


def load_config(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> ClusterConfig:
    """Read and check a cluster file. Relative paths in it start at the file's folder. The admin token may stand in the
    environment instead, so that the file holds no secret.

    Raises ConfigError.
    """
    file = FilePath(path)
    config = read_yaml(file, ClusterConfig, "cluster file")
    token = environ.get(ADMIN_TOKEN_VARIABLE)
    if token and config.router.admin_token is None:
        config = config.model_copy(update={"router": config.router.model_copy(update={"admin_token": token})})
    return _resolve_paths(config, file.resolve().parent)


def load_model_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A model's config.json. Raises ConfigError."""
    try:
        data = json.loads(FilePath(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror or exc}; give the path of a config.json") from exc
    except ValueError as exc:
        raise ConfigError(f"{path} is not JSON: give the path of a model's config.json") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{path} does not hold one JSON object: give the path of a model's config.json")
    return data


def _resolve_paths(config: ClusterConfig, folder: FilePath) -> ClusterConfig:
    model = config.model
    if model.path and is_local(model.path):
        model = model.model_copy(update={"path": _absolute(folder, model.path)})
    engine = config.engine
    if engine.python and os.sep in engine.python:
        engine = engine.model_copy(update={"python": _absolute(folder, engine.python)})
    router = config.router
    if router.decision_log:
        router = router.model_copy(update={"decision_log": _absolute(folder, router.decision_log)})
    fleet = config.fleet
    if fleet is not None and fleet.file is not None:
        fleet = fleet.model_copy(update={"file": _absolute(folder, fleet.file)})
    if fleet is not None and fleet.kubernetes is not None:
        named = {key: getattr(fleet.kubernetes, key) for key in ("token_file", "ca_file")}
        resolved = {key: _absolute(folder, value) for key, value in named.items() if value is not None}
        fleet = fleet.model_copy(update={"kubernetes": fleet.kubernetes.model_copy(update=resolved)})
    return config.model_copy(update={"model": model, "engine": engine, "fleet": fleet, "router": router})


def is_local(path: str) -> bool:
    """Whether a model is named by its folder, and not as on a hub."""
    return path.startswith((".", "/", "~"))


def _absolute(folder: FilePath, path: str) -> str:
    # normpath, not resolve(): a venv's python is a symlink that must not be followed.
    return os.path.normpath(folder / FilePath(path).expanduser())
