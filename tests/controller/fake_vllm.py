"""Stands in for engine.python: takes vLLM's command line and answers as the scripted engine does."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fakes.engine import FakeEngine
from tests.fakes.wire import IdleProtocol


class _Elsewhere(FakeEngine):
    """Listens where the controller says; a scripted engine stays on loopback."""

    def __init__(self, host: str, served_name: str) -> None:
        super().__init__(served_name=served_name)
        self._host = host

    async def start(self, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: IdleProtocol(self._connected), self._host, port)
        self.port = port


async def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    told, _ = parser.parse_known_args()
    await _Elsewhere(told.host, told.served_model_name).start(told.port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
