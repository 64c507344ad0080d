""":class:`EngineProcess`: one engine in a child process, from its start to its last file."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rustvllm.config import EngineConfig
from rustvllm.engine.address import EngineAddress
from rustvllm.engine.child_process import ChildProcess
from rustvllm.engine.config_json import plain


class EngineProcess(ChildProcess):
    """An engine process that imports what it needs and waits for :meth:`load`.

    Args:
        directory: Private directory of the parent's, which the child removes when the parent is gone.
        executor: As in the engine's arguments: what to import already.
        rank: Which one of several.

    Attributes:
        ready: What it said when it was ready; empty before.
        death: Why it died, in its own words, if it could say so.
    """

    def __init__(self, directory: Path, executor: str, rank: int = 0) -> None:
        super().__init__("rustvllm.engine.process", f"engine process {rank}", directory, ("--executor", executor))
        self.rank = rank
        self.ready: Mapping[str, Any] = {}
        self.death: str | None = None

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
                "config": plain(config),
                "address": str(address),
                "secret": None if secret is None else base64.b64encode(secret).decode(),
                "cuda_visible_devices": cuda_visible_devices,
            }
        )

    def wait_until_ready(self) -> None:
        """Wait for the end of :meth:`load`.

        Raises:
            RustVLLMError: What kept the engine from starting, as it was raised there.
            EngineDeadError: It ended without a word.
        """
        self.ready = self.read_ready()

    def wait_for_end(self) -> None:
        """Wait until the process has ended."""
        while (status := self.read_status()) is not None:
            self.death = status.get("death", self.death)
        self.wait()

    @property
    def why_ended(self) -> str:
        """Why the process ended, in its own words or as the kernel tells."""
        return self.death or f"the {self.name} ended, {self.end}"
