"""A Ray for a whole test module: prints its address and stays until stdin closes."""

from __future__ import annotations

import os
import sys

import ray

from disagg_router.controller.ray_session import RaySession


def main() -> None:
    RaySession.connect(sys.argv[1], 4, {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"})
    sys.stdout.write(f"{ray.get_runtime_context().gcs_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
