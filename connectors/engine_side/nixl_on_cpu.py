"""`kv_connector_module_path` of a CPU engine: vLLM's own NIXL connectors with three faults mended.

1. NIXL's Python API starts its progress thread with a poll time of 0, so it spins on a whole core.
2. The connector's worker moves itself to the last core of the machine, whatever affinity it was given.
3. On processors with AMX the attention kernel uses tile registers that a process must first ask the kernel for. oneDNN
   asks when it first multiplies large matrices, that is in a prefill; an engine whose first forward pass is a decode
   step on pulled KV has not done one, and dies of an illegal instruction.

All in place, since MultiConnector looks its children up by class name and a subclass has another one.
"""

import os
from typing import Any

import nixl_cu12._bindings as bindings
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector, NixlPushConnector

# Microseconds between polls. The thread also wakes on UCX's file descriptors, so transfers do not wait for it.
_POLL_US = int(os.environ.get("DISAGG_NIXL_POLL_US", "2000"))


def _let_the_progress_thread_sleep() -> None:
    original = bindings.nixlAgent

    def nixl_agent(name: str, config: Any) -> Any:  # noqa: ANN401 - NIXL's own untyped classes
        config.pthrDelay = _POLL_US
        return original(name, config)

    bindings.nixlAgent = nixl_agent


def _keep_affinity(connector: Any) -> Any:  # noqa: ANN401 - a class, patched in place
    original = connector.__init__

    def init(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's own types
        affinity = os.sched_getaffinity(0)
        original(self, vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, affinity)

    connector.__init__ = init
    return connector


_let_the_progress_thread_sleep()
torch.cpu._init_amx()  # False, and harmless, where there is no AMX
# The name that --kv-transfer-config asks this module for; the push twin is asked for by its own.
NixlConnector = _keep_affinity(NixlPullConnector)
_keep_affinity(NixlPushConnector)
