"""What a cluster file asks the controller for: its name, its instances, and what can be known to be wrong with them."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from disagg_router.config import ClusterConfig, is_local
from disagg_router.errors import ConfigError
from disagg_router.model import InstanceId, InstanceSpec, Role


def check_launchable(config: ClusterConfig) -> None:
    """Everything that can be known to be wrong before anything is started. Raises ConfigError."""
    if not config.pools:
        raise ConfigError("pools is empty: name at least one of prefill, decode, unified with its number of instances")
    roles = set(config.pools)
    if Role.PREFILL in roles and not roles & {Role.DECODE, Role.UNIFIED}:
        raise ConfigError("pools has prefill but nothing that decodes: add a decode or unified pool")
    path = config.model.path
    if path is None:
        raise ConfigError("model.path is missing: name the model folder or hub id that the engines load")
    if is_local(path) and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.path {path} is not a model folder (no config.json in it): correct model.path")
    python = engine_python(config)
    if not shutil.which(python):
        raise ConfigError(f"engine.python {python} is not an executable: correct engine.python or leave it out")
    for role, pool in config.pools.items():
        if config.engine.device == "cuda" and pool.gpus == 0:
            raise ConfigError(f"pools.{role}.gpus is 0 but engine.device is cuda: give each instance at least one GPU")
        if config.engine.device == "cpu" and pool.gpus:
            raise ConfigError(f"pools.{role}.gpus is {pool.gpus} but engine.device is cpu: set gpus to 0")


def engine_python(config: ClusterConfig) -> str:
    return config.engine.python or sys.executable


def cluster_id(path: str | os.PathLike[str]) -> str:
    """Names a cluster by its file, so that `down FILE` can prove which processes are its own."""
    resolved = str(Path(path).resolve())
    return f"{Path(resolved).parent.name}-{hashlib.sha256(resolved.encode()).hexdigest()[:10]}"


def instance_specs(config: ClusterConfig, cluster: str) -> tuple[InstanceSpec, ...]:
    """Every instance the file asks for, in a stable order; `check_launchable` has passed."""
    order = [role for role in (Role.DECODE, Role.PREFILL, Role.UNIFIED) if role in config.pools]
    members = [(role, i) for role in order for i in range(config.pools[role].instances)]
    return tuple(_spec(config, cluster, role, i, index) for index, (role, i) in enumerate(members))


def _spec(config: ClusterConfig, cluster: str, role: Role, i: int, index: int) -> InstanceSpec:
    pool, engine = config.pools[role], config.engine
    return InstanceSpec(
        id=InstanceId(f"{role}-{i}"),
        cluster=cluster,
        role=role,
        index=index,
        model=config.model.path or "",
        served_name=config.model.served_name,
        revision=config.model.revision,
        device=engine.device,
        python=engine_python(config),
        args={**engine.args, **pool.args},
        env={**engine.env, **pool.env},
        gpus=pool.gpus,
        cpus=engine.cpus if engine.device == "cpu" else None,
        labels=pool.labels,
    )
