"""Types of the packed products and norms in ``rustvllm._core``, where they are found; no module has this name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self, final

import numpy as np
import numpy.typing as npt

class _FileRows(Protocol):
    """Where the rows of a tensor lie in a file: see ``whole_rows.FileRows``."""

    @property
    def file(self) -> Path: ...
    @property
    def offset(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def type_name(self) -> str: ...
    @property
    def interleaved_rows(self) -> int: ...

@final
class CpuThreads:
    """The calling thread and its helpers: one set per process, for attention and products alike.

    A helper looks out for the next call for ``spin_us`` microseconds before it sleeps. A call that finds the threads
    taken by another one is computed by its caller alone.
    """

    def __new__(cls, num_threads: int, *, spin_us: int | None = None) -> Self:
        """``num_threads`` compute, the caller included; ``spin_us`` is at most 1,000,000, None: 500.

        Raises ``ValueError`` outside 1 to 1024, ``OSError`` when the system starts no more threads.
        """
    @property
    def num_threads(self) -> int: ...
    def peak(self, kind: Literal["f32", "bf16", "int8"]) -> float | None:
        """Operations per second that all threads reach from registers, two to a product; for measurements.

        None where the processor has no instruction that adds such products. The matrix unit is not measured. Raises
        ``ValueError`` for another kind.
        """

@final
class PackedLinear:
    """The weight ``[out_features, in_features]`` of a linear layer, in the order in which products read it.

    An output has the same bits whatever other rows are computed with it, and on any number of threads; see
    ``set_matrix_rows`` for what changes that.
    """

    def __new__(
        cls,
        threads: CpuThreads,
        out_features: int,
        in_features: int,
        kind: Literal["f32", "bf16", "f16", "int8", "w8a8", "int6", "w6a8", "int4", "w4a8"],
        group_size: int | None = None,
        *,
        scales: Literal["f32", "f16", "bf16", "two-level"] | None = None,
        zeros: Literal["middle", "point", "minimum", "codes"] = "middle",
    ) -> Self:
        """Room for the weight, which ``pack_rows`` fills.

        ``int8`` keeps whole numbers of 8 bits and a float32 scale per output and ``group_size`` inputs (None: all
        inputs). ``w8a8`` does, too, and rounds what it is multiplied with to 8 bits, per row and block of 32 inputs (16
        where ``group_size`` is 16; otherwise it must be a multiple of 32 or all inputs). ``int4`` and ``w4a8`` are the
        same with numbers of 4 bits, whose groups are multiples of 32 or all inputs, ``int6`` and ``w6a8`` with 6 bits,
        in groups of 16, from −32 to 31.

        ``scales`` says how these are kept, None: of 8 bits as float32, of 4 as float16; ``two-level``: as Q4_K, or
        for 6 bits Q6_K, has them. ``zeros`` says what numbers are counted from: the middle (8 of 4 bits, 0 of 8), a
        zero point of each group (4 bits), 0 with a minimum that is taken away from each group, or 0 where 4 bits are
        codes of 0, 1, 2, 3, 4, 6, 8 and 12 with a sign, twice those of MXFP4, by which numbers are given and returned.

        Raises ``ValueError`` naming the value and the limit, ``MemoryError`` saying how much is needed.
        """
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def kind(self) -> Literal["f32", "bf16", "f16", "int8", "w8a8", "int6", "w6a8", "int4", "w4a8"]: ...
    @property
    def has_form(self) -> bool:
        """Whether weights have more than ``int8``: 4 bits, scales of 16 bits, zero points or minima."""
    @property
    def nbytes(self) -> int:
        """Memory of weights, scales and bias."""
    @staticmethod
    def kernel() -> Literal["avx512", "avx2", "portable", "scalar"]:
        """Which kernel computes products on this machine."""
    @staticmethod
    def w8a8_kernels() -> tuple[list[str], list[str]]:
        """Which kernels compute ``w8a8`` products of few rows and of many, and which fail on this machine.

        Names are "amx-int8", "avx512-vnni", "avx-vnni", "avx2", "portable" and "scalar".

        Each is compared with plain code before its first use, and not used unless the results have the same bits.
        """
    @staticmethod
    def bf16_kernel() -> tuple[str, bool]:
        """What multiplies bfloat16 rows by ``bf16`` weights without the matrix unit, and whether a better one fails.

        Names are "avx512-bf16", which sums products of 16-bit numbers, and those of ``kernel``, which widen both. The
        first is compared with plain code before its first use, and not used where its sums are wrong.
        """
    @staticmethod
    def num_streams() -> Literal[1, 2]:
        """In how many streams of memory each core reads the weights of few rows: 1 on AMD's before Zen 5, else 2.

        ``RUSTVLLM_CPU_STREAMS`` chooses another number, for comparisons. Products have the same bits with both.
        """
    @staticmethod
    def has_matrix_unit() -> bool:
        """Whether this machine has a matrix unit (AMX) that multiplies packed weights."""
    def set_matrix_rows(self, num_rows: int | None) -> None:
        """Let the matrix unit compute products of ``num_rows`` rows and more; None, and at first: of none.

        Its sums are as exact, but have another order: a row's bits then depend on whether there are so many rows.
        Raises ``ValueError`` where there is no such unit, and for ``w8a8``.
        """
    def pack_rows(self, first_row: int, weight: npt.NDArray[Any]) -> None:
        """Pack rows ``first_row..`` of the weight, as many as ``weight`` has; all must be packed before ``forward``.

        ``weight`` is ``[rows, in_features]`` of float32, or of bfloat16 seen as uint16, with any strides (a transposed
        view will do). Takes no memory besides the layer's own; releases the interpreter.

        Raises ``TypeError`` for another dtype; ``ValueError`` naming the value and the limit, and for numbers that are
        not finite where they become whole ones. Not while another thread uses the layer: ``RuntimeError``.
        """
    def pack_blocks(self, first_row: int, type_name: str, blocks: npt.NDArray[np.uint8]) -> None:
        """Pack rows from blocks of a GGUF file whose numbers are whole ones with scales; nothing is rounded.

        ``blocks`` is ``[rows, bytes of a row]``; the layer has whole numbers, in groups that those of the blocks
        consist of, and minima where the blocks have them.
        Otherwise as ``pack_rows``.

        Raises ``ValueError`` for another kind or type, lengths that do not fit, and scales that are not finite.
        """
    def pack_whole(
        self,
        first_row: int,
        numbers: npt.NDArray[np.int8],
        scales: npt.NDArray[np.float32],
        zeros: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Pack rows from whole numbers and their scales; nothing is rounded.

        ``numbers`` is ``[rows, in_features]``, in the order of ``set_input_order``, ``scales`` ``[rows, groups]``. Of 4
        bits, numbers are −8 to 7 where the layer counts from the middle, else 0 to 15, and ``zeros`` ``[rows, groups]``
        are the zero points that they are counted from; a layer with minima takes away scale · zero. Otherwise as
        ``pack_rows``.

        Raises ``ValueError`` for another kind, lengths that do not fit, numbers that 4 bits do not hold, and scales
        that are not finite or not of the 16 bits that they are kept in.
        """
    def pack_words(
        self,
        first_row: int,
        words: npt.NDArray[np.int32],
        layout: Literal["awq", "gptq", "packed", "mxfp4"],
        bits: int,
        less: int,
        scales: npt.NDArray[np.float32],
        zeros: npt.NDArray[np.float32] | None = None,
        order: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        """Pack all rows of a part from words of 32 bits, as ``pack_whole`` packs the numbers in them, less ``less``.

        ``words`` is ``[inputs, outputs · bits / 32]`` of ``awq`` (4 bits), ``[inputs · bits / 32, outputs]`` of
        ``gptq`` and ``[outputs, words of the inputs]`` of ``packed`` and ``mxfp4`` (codes of 4 bits, and rows get what
        they stand for), contiguous. ``order`` is that of ``set_input_order``, for numbers in the order of the inputs.

        Raises ``ValueError`` for another layout, words that do not hold rows of the layer's inputs, and as
        ``pack_whole``.
        """
    def set_input_order(self, order: npt.NDArray[np.uint32]) -> None:
        """Have groups whose inputs lie apart: place ``k`` of a row for ``pack_whole`` is that of input ``order[k]``.

        ``forward`` gathers its activations in this order first; ``unpack_row`` gives the layer's own. Raises
        ``ValueError`` for weights in floating point, and unless each input occurs once.
        """
    def set_bias(self, bias: npt.NDArray[np.float32] | None) -> None:
        """The bias, float32 ``[out_features]``, copied; None takes it away."""
    def forward(
        self,
        x: npt.NDArray[Any],
        out: npt.NDArray[Any],
        *,
        activation: Literal["none", "relu", "silu", "gelu_erf", "gelu_tanh", "clamped_silu"] | None = None,
        residual: npt.NDArray[Any] | None = None,
    ) -> None:
        """``out = activation(x @ weight.T + bias) + residual``.

        ``x`` is ``[rows, in_features]``, ``out`` and ``residual`` ``[rows, out_features]``: float32, or bfloat16 seen
        as uint16, ``residual`` as ``out``. Elements of a row are contiguous, rows may lie apart. ``out`` shares memory
        with nothing else, but may be ``residual`` itself. Sums are float32 for every kind. Releases the interpreter
        when there is much to compute.

        Raises ``TypeError`` for another dtype, ``ValueError`` naming the value and the limit.
        """
    def read(self) -> int:
        """Read all weights and their scales once, by all threads, for measurements; a number that depends on each."""
    def unpack_row(self, row: int, out: npt.NDArray[np.float32]) -> None:
        """Write a row of the weight, rounded to its kind, to ``out``, float32 ``[in_features]``."""
    def unpack_rows(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
        """Write rows of the weight, rounded to its kind, to ``out``, float32 ``[len(rows), in_features]``.

        Raises ``ValueError`` for a row that there is not; the rows before it are written then.
        """

def pack_files(
    threads: CpuThreads,
    layers: Sequence[tuple[PackedLinear, int, int, _FileRows]],
    tables: Sequence[tuple[npt.NDArray[np.uint8], _FileRows]],
) -> tuple[int, Exception] | None:
    """As ``PackedLinear.pack_blocks``, of many layers at once, from files that the packing threads read.

    Of each tensor of ``layers``: the layer, the first row there, how many, and where they lie. ``tables`` are
    arrays of bytes ``[rows, bytes of a row]``, which are read as they are.

    What cannot be done is returned: the tensor's place among the layers, or among the tables after them, with an
    ``OSError`` when the file cannot be read or ends too early, else with what ``pack_blocks`` raises. What has no
    part in that may be packed then or not.
    """

def layer_norm(
    threads: CpuThreads,
    x: npt.NDArray[Any],
    weight: npt.NDArray[np.float32],
    bias: npt.NDArray[np.float32] | None,
    eps: float,
    out: npt.NDArray[Any],
    *,
    residual: npt.NDArray[Any] | None = None,
    sum_out: npt.NDArray[Any] | None = None,
) -> None:
    """Norm rows: ``sum_out = x + residual``, ``out = (sum_out - mean) / sqrt(variance + eps) * weight + bias``.

    ``x``, ``out``, ``residual`` and ``sum_out`` are ``[rows, features]``, all float32 or all bfloat16 seen as uint16;
    elements of a row are contiguous, rows may lie apart. ``out`` shares memory with no other array; ``sum_out`` may be
    ``residual`` itself. The sum is rounded to its dtype before it is normed. A row has the same bits in any batch.

    Raises ``TypeError`` for another dtype, ``ValueError`` naming the value and the limit.
    """

def rms_norm(
    threads: CpuThreads,
    x: npt.NDArray[Any],
    weight: npt.NDArray[np.float32],
    eps: float,
    out: npt.NDArray[Any],
    *,
    residual: npt.NDArray[Any] | None = None,
    sum_out: npt.NDArray[Any] | None = None,
) -> None:
    """Norm rows: ``out = sum_out / sqrt(mean(sum_out**2) + eps) * weight``; everything else as ``layer_norm``."""
