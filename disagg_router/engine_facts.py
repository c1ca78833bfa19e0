"""What the cluster file, and the model's files where they are here, say of the engines."""

from __future__ import annotations

import os
from collections.abc import Mapping

from disagg_router.config import ArgValue, ClusterConfig, load_model_config
from disagg_router.connectors.compatibility import argument_name
from disagg_router.cost.geometry import KVDtype, from_config
from disagg_router.cost.priors import Priors, priors
from disagg_router.errors import ConfigError
from disagg_router.model import Instance
from disagg_router.routing.model_folder import model_folder

CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS = 2048, 8192  # vLLM's defaults for its API server


def priors_of(config: ClusterConfig) -> Priors:
    """A model whose files are not here is taken for an 8B; its requests correct the times, not the bytes of its KV."""
    path, device = config.model.path, config.engine.device
    folder = model_folder(path, config.model.revision, os.environ) if path else None
    model = None
    if folder is not None and (folder / "config.json").is_file():
        model = load_model_config(str(folder / "config.json"))
    try:
        dtype = KVDtype.FP8 if "fp8" in str(_argument(config.engine.args, "kv-cache-dtype")) else KVDtype.BF16
        geometry = from_config(model, dtype=dtype) if model is not None else None
    except ConfigError:
        geometry = None
    tp = _argument(config.engine.args, "tensor-parallel-size")
    return priors(
        model,
        geometry,
        device=device,
        tp=tp if isinstance(tp, int) else 1,
        chunk_tokens=CPU_CHUNK_TOKENS if device == "cpu" else GPU_CHUNK_TOKENS,
    )


def chunk_tokens_of(config: ClusterConfig, instance: Instance | None) -> int | None:
    """--max-num-batched-tokens as the file gives it for this instance; None where it does not."""
    if instance is None:
        return None
    own: Mapping[str, ArgValue] = {}
    if pool := config.pools.get(instance.role):
        own = pool.args
    for entry in (config.fleet.static or []) if config.fleet else []:
        if entry.url == instance.url:
            own = entry.args or {}
    tokens = _argument({**config.engine.args, **own}, "max-num-batched-tokens")
    return tokens if isinstance(tokens, int) else None


def _argument(args: Mapping[str, ArgValue], name: str) -> ArgValue:
    return next((value for key, value in args.items() if argument_name(key) == name), None)
