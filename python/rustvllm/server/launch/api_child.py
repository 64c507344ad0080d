""":class:`ApiChild`: an API process as its launcher sees it."""

from pathlib import Path

from rustvllm.process.child import ChildProcess
from rustvllm.process.config_json import plain
from rustvllm.server.flags.settings import ServerSettings


class ApiChild(ChildProcess):
    """An API process on a socket that listens; it answers ``loading`` until it learns where its engines are."""

    def __init__(self, directory: Path, index: int, listen_fd: int, load_fd: int, settings: ServerSettings) -> None:
        super().__init__(
            "rustvllm.server.api_process",
            f"API process {index}",
            directory,
            ("--listen-fd", str(listen_fd), "--load-fd", str(load_fd), "--index", str(index)),
            (listen_fd, load_fd),
        )
        self.order({"settings": plain(settings)})
