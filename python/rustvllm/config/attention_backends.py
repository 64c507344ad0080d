"""What each attention backend can do, as plain data, so that a configuration is checked without importing torch."""

from dataclasses import dataclass
from typing import Final

from rustvllm import envs
from rustvllm.exceptions import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionBackendRow:
    """One row of :data:`BACKENDS`.

    Attributes:
        name: As ``--attention-backend`` takes it, and as the backend calls itself.
        devices: Where it computes.
        dtypes: Which queries it takes; the cache has the same dtype unless it is fp8.
        reads_fp8: It reads a KV cache of eight bits (e4m3).
        is_batch_invariant: It sums in an order that does not depend on the batch, or has a mode that does.
        has_graphs: Its decodes can be captured in CUDA graphs.
        is_interpreted_on_cpu: On the CPU it runs under ``TRITON_INTERPRET=1`` alone, for tests.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    reads_fp8: bool = False
    is_batch_invariant: bool = False
    has_graphs: bool = False
    is_interpreted_on_cpu: bool = False


BACKENDS: Final = {
    row.name: row
    for row in (
        AttentionBackendRow(
            "triton",
            devices=("cuda",),
            dtypes=("float32", "float16", "bfloat16"),
            reads_fp8=True,
            is_batch_invariant=True,
            has_graphs=True,
            is_interpreted_on_cpu=True,
        ),
        AttentionBackendRow("cpu", devices=("cpu",), dtypes=("float32", "bfloat16"), is_batch_invariant=True),
        AttentionBackendRow("torch", devices=("cpu", "cuda"), dtypes=("float32", "float16", "bfloat16")),
    )
}
"""By name, in the order in which ``auto`` tries them; ``attention/selector`` makes them."""
ATTENTION_BACKENDS: Final = ("auto", *BACKENDS)
"""What ``--attention-backend`` takes."""


def backends_of(device: str, dtype: str | None = None) -> list[AttentionBackendRow]:
    """The backends that compute on a device, and in a dtype if one is given, in the order of ``auto``."""
    rows = (row for row in BACKENDS.values() if device in row.devices)
    return [row for row in rows if dtype is None or dtype in row.dtypes]


def check_device(name: str, device: str, *, batch_invariant: bool) -> None:
    """Refuse a backend that does not compute on a device, or not in an order that the batch has no influence on.

    Raises:
        ConfigError: Names the backends that do.
    """
    if name == "auto":
        return
    row = BACKENDS[name]
    if device not in row.devices and not (row.is_interpreted_on_cpu and device == "cpu"):
        raise ConfigError(
            f"attention_backend is {name}, but device is {device}: set attention_backend to "
            f"{_either(backends_of(device))}"
        )
    if device not in row.devices and not envs.triton_interpret():
        raise ConfigError(
            f"attention_backend is {name}, but device is cpu, where its kernels run under TRITON_INTERPRET=1 alone, "
            f"for tests: set attention_backend to {_either(backends_of(device))}"
        )
    invariant = [each for each in backends_of(device) if each.is_batch_invariant]
    if batch_invariant and row not in invariant:
        raise ConfigError(
            f"batch_invariant is set, but attention_backend is {name}, which sums in an order that depends on the "
            f"batch: set attention_backend to {_either(invariant)}"
        )


def check_dtype(name: str, device: str, dtype: str) -> None:
    """Refuse a backend that does not compute in a dtype; ``auto`` takes one that does.

    Raises:
        ConfigError: Names the backends and the dtypes that fit.
    """
    if name != "auto" and dtype != "auto" and dtype not in (row := BACKENDS[name]).dtypes:
        raise ConfigError(
            f"attention_backend is {name}, which computes in {' and '.join(row.dtypes)}, but dtype is {dtype}: set "
            f"attention_backend to {_either(backends_of(device, dtype))}, or dtype to {row.dtypes[-1]}"
        )


def check_fp8(name: str, device: str, kv_cache_dtype: str) -> None:
    """Refuse a KV cache of eight bits that the backend does not read.

    Raises:
        ConfigError: Names the backends that do.
    """
    readers = [row for row in BACKENDS.values() if row.reads_fp8]
    if device == "cpu" and (name == "auto" or not BACKENDS[name].reads_fp8):
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype}, which is for CUDA, but device is cpu: set kv_cache_dtype to auto"
        )
    if name != "auto" and not BACKENDS[name].reads_fp8:
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype}, which attention_backend {name} does not read: set attention_backend "
            f"to {_either(readers)}, or kv_cache_dtype to auto"
        )


def check_graphs(name: str, device: str) -> None:
    """Refuse named sizes of CUDA graphs with a backend whose decodes cannot be captured.

    Raises:
        ConfigError: Names the backends whose decodes can.
    """
    able = [row for row in backends_of(device) if row.has_graphs]
    if able and name != "auto" and not BACKENDS[name].has_graphs:
        raise ConfigError(
            f"cudagraph_capture_sizes is set, but attention_backend is {name}, whose decodes cannot be captured: leave "
            f"it out, or set attention_backend to {_either(able)}"
        )


def _either(rows: list[AttentionBackendRow]) -> str:
    return f"{', '.join(row.name for row in rows)} or auto"
