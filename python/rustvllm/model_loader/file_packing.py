"""Tensors that go from a file into packed layers and tables as they are: many of them at once.

The core's threads read and pack all of a batch together, so that none waits for another at the end of a tensor, nor for
Python between two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from rustvllm.byte_progress import ByteProgress
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.whole_rows import FileRows, LayerPlace, LayerRows, TableRows
from rustvllm.model_loader.checkpoint import StoredTensor
from rustvllm.model_loader.reading import unreadable

BATCH_BYTES = 256 << 20
"""What is packed at once; then the progress moves. A tensor that is longer is a batch of its own."""


class FilesPacker(Protocol):
    """Who has threads to pack with."""

    def pack_files(self, layers: list[LayerRows], tables: list[TableRows]) -> tuple[int, Exception] | None:
        """Pack rows of layers, and read tables as they are; see ``_core.pack_files``."""
        ...


class FileBatch:
    """What is to be packed next.

    Args:
        packer: Does it.
        progress: Called with numbers of bytes, as they are read.
        filled: Called with every tensor of the model that has its values.
    """

    def __init__(self, packer: FilesPacker, progress: ByteProgress, filled: Callable[[Tensor], None]) -> None:
        self._packer, self._progress, self._filled = packer, progress, filled
        self._layers: list[LayerRows] = []
        self._tables: list[TableRows] = []
        self._of_layers: list[StoredTensor] = []
        self._of_tables: list[StoredTensor] = []
        self._targets: list[Tensor] = []
        self._is_later = False  # some rows of the tensor at hand are in the batch
        self._num_bytes = 0

    def add_rows(self, stored: StoredTensor, place: LayerPlace, rows: FileRows) -> None:
        """Have a tensor packed into a layer.

        Args:
            stored: The tensor.
            place: Where it goes.
            rows: Where the tensor lies.
        """
        self._layers.append((*place, stored.file_shape[0], rows))
        self._of_layers.append(stored)
        self._note(stored)

    def add_table(self, stored: StoredTensor, table: Tensor, rows: FileRows) -> None:
        """Have a tensor read as it is.

        Args:
            stored: The tensor.
            table: uint8 ``[rows, bytes of a row]``, with room for as many rows at least.
            rows: Where the tensor lies.
        """
        self._tables.append((table[: stored.file_shape[0]], rows))
        self._of_tables.append(stored)
        self._note(stored)

    def end_target(self, target: Tensor) -> None:
        """All parts of a tensor of the model are given, or filled already."""
        if not self._is_later:
            self._filled(target)
            return
        self._is_later = False
        self._targets.append(target)
        if self._num_bytes >= BATCH_BYTES:
            self.pack()

    def _note(self, stored: StoredTensor) -> None:
        self._num_bytes += stored.nbytes
        self._is_later = True

    def pack(self) -> None:
        """Pack what was added since last time.

        Raises:
            ModelLoadError: A file cannot be read, or has become shorter; or a scale is not finite.
        """
        failed = self._packer.pack_files(self._layers, self._tables)
        if failed is not None:
            place, error = failed
            stored = (self._of_layers + self._of_tables)[place]
            if isinstance(error, OSError):
                raise unreadable(stored, error) from error
            if isinstance(error, ValueError):
                raise ModelLoadError(f"{stored.file}: tensor {stored.name!r} cannot be packed: {error}") from error
            raise error
        self._progress.advance(self._num_bytes)
        for target in self._targets:
            self._filled(target)
        self._layers, self._tables, self._of_layers, self._of_tables, self._targets = [], [], [], [], []
        self._num_bytes = 0
