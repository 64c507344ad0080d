"""Types of GGUF files in ``rustvllm._core``, where they are found; no module has this name."""

from pathlib import Path
from typing import Any, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt

GgufScalar: TypeAlias = bool | int | float | str

@final
class GgufFile:
    """The header of a GGUF file, or those of the files that a model was split into.

    Everything is checked before memory is taken for it; weights are not read.
    """

    def __new__(cls, path: Path) -> Self:
        """Read the header of a file; of the first of several, the others' too.

        Raises ``OSError`` when a file cannot be read, ``ValueError`` naming the file and what is wrong with it.
        """
    @property
    def paths(self) -> list[Path]:
        """The files, the first one first."""
    @property
    def version(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    def keys(self) -> list[str]: ...
    def get(self, key: str) -> GgufScalar | list[Any] | None:
        """The value of a key of the first file; None when it is not there."""
    def tensors(self) -> list[tuple[str, str, list[int], int, int, int]]:
        """Every tensor: name, type, shape (rows first), index into ``paths``, offset in that file, bytes."""

def gguf_type_sizes() -> list[tuple[str, int, int]]:
    """Every type of tensor: its name, the numbers of a block, the bytes of a block."""

def unpack_blocks(type_name: str, blocks: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    """Write the numbers of blocks to ``out``; both are contiguous. Releases the interpreter, and shares much work.

    Raises ``TypeError`` for another dtype, ``ValueError`` for a type that is not unpacked or lengths that do not fit.
    """

def whole_blocks(
    type_name: str,
    blocks: npt.NDArray[np.uint8],
    numbers: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float32],
    minima: npt.NDArray[np.float32],
) -> None:
    """Write the whole numbers of blocks, and scale and minimum of each group: scale · number − minimum.

    All are contiguous and apart from each other; how many numbers there are for each scale says how large groups are.
    Blocks without minima have minima of 0. Releases the interpreter.

    Raises ``TypeError`` for another dtype, ``ValueError`` for a type without scales, or lengths or groups that do not
    fit.
    """
