""":class:`EngineProcess`: one engine in a child process."""

import base64
from pathlib import Path

from rustvllm.config import EngineConfig
from rustvllm.process.address import EngineAddress
from rustvllm.process.child import ChildProcess
from rustvllm.process.config_json import plain


class EngineProcess(ChildProcess):
    """An engine process. It starts at once, imports its libraries and waits for :meth:`load`.

    Args:
        directory: The parent's private directory, which the child removes when the parent has ended.
        executor: The engine's ``executor`` argument, which decides what the child imports.
        rank: Number of the engine, from 0.
    """

    def __init__(self, directory: Path, executor: str, rank: int = 0) -> None:
        super().__init__("rustvllm.engine.process", f"engine process {rank}", directory, ("--executor", executor))
        self._rank = rank

    def load(
        self,
        config: EngineConfig,
        address: EngineAddress,
        secret: bytes | None = None,
        cuda_visible_devices: str | None = None,
    ) -> None:
        """Order the process to load a model and to listen.

        Args:
            config: The engine's configuration.
            address: Where to listen.
            secret: The secret that clients over TCP must know; None for a Unix socket.
            cuda_visible_devices: Value of ``CUDA_VISIBLE_DEVICES`` for the process; None leaves it as it is.
        """
        self.order(
            {
                "name": f"engine {self._rank}",
                "config": plain(config),
                "address": str(address),
                "secret": None if secret is None else base64.b64encode(secret).decode(),
                "cuda_visible_devices": cuda_visible_devices,
                "rank": self._rank,
            }
        )
