""":class:`EngineProcess`: one engine in a child process, from its start to its last file."""

import base64
from pathlib import Path

from rustvllm.config import EngineConfig
from rustvllm.process.address import EngineAddress
from rustvllm.process.child import ChildProcess
from rustvllm.process.config_json import plain


class EngineProcess(ChildProcess):
    """An engine process that imports what it needs and waits for :meth:`load`.

    Args:
        directory: Private directory of the parent's, which the child removes when the parent is gone.
        executor: As in the engine's arguments: what to import already.
        rank: Which one of several.
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
        """Say what to load and where to listen."""
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
