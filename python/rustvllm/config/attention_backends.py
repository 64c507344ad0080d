"""What each attention backend supports, as plain data: checking a configuration needs no torch."""

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
        dtypes: Which queries it takes.
        cache_dtypes: Dtypes that its KV cache may have in addition to the queries' dtype.
        is_batch_invariant: It sums in an order that does not depend on the batch, or has such a mode.
        has_graphs: Its decodes can be captured in CUDA graphs.
        is_interpreted_on_cpu: On the CPU it only runs under ``TRITON_INTERPRET=1``, for tests.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    cache_dtypes: tuple[str, ...] = ()
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
            cache_dtypes=("fp8",),
            is_batch_invariant=True,
            has_graphs=True,
            is_interpreted_on_cpu=True,
        ),
        AttentionBackendRow(
            "cpu",
            devices=("cpu",),
            dtypes=("float32", "bfloat16"),
            cache_dtypes=("bfloat16", "int8_per_token_head"),
            is_batch_invariant=True,
        ),
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
    """Refuse a backend that does not support a device, or, with ``batch_invariant``, sums in an order of the batch.

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
            f"attention_backend is {name}, but device is cpu, where its kernels only run under TRITON_INTERPRET=1, for "
            f"tests: set attention_backend to {_either(backends_of(device))}"
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


def check_cache_dtype(name: str, device: str, dtype: str, kv_cache_dtype: str) -> None:
    """Refuse a KV cache dtype that no backend, or not the named one, supports for queries of a dtype.

    Raises:
        ConfigError: Names what would work.
    """
    wanted = "fp8" if kv_cache_dtype.startswith("fp8") else kv_cache_dtype
    if wanted in ("auto", dtype):
        return
    if device == "cuda" and wanted == "bfloat16" and dtype == "auto":
        return  # the checkpoint may be in bfloat16, which is known when it is loaded
    readers = [row for row in BACKENDS.values() if wanted in row.cache_dtypes]
    if name != "auto" and BACKENDS[name] in readers:
        return
    able = [row for row in backends_of(device, None if dtype == "auto" else dtype) if row in readers]
    if name == "auto" and able:
        return
    if able:
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype}, which attention_backend {name} does not support: set "
            f"attention_backend to {_either(able)}, or kv_cache_dtype to auto"
        )
    if not any(device in row.devices for row in readers) and wanted != "bfloat16":
        where = "CUDA" if device == "cpu" else "the CPU"
        others = sorted({each for row in BACKENDS.values() if device in row.devices for each in row.cache_dtypes})
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype}, which only works on {where}, but device is {device}: set "
            f"kv_cache_dtype to {', '.join(others)} or auto"
        )
    dtypes = {dtype for row in readers if device in row.devices for dtype in row.dtypes}
    fitting = sorted({"bfloat16", *dtypes})  # a cache of bfloat16 is what auto gives a model in it
    raise ConfigError(
        f"kv_cache_dtype is {kv_cache_dtype}, which on {device} needs a model in {' or '.join(fitting)}, but dtype is "
        f"{dtype}: set dtype to {fitting[0]}, or kv_cache_dtype to auto"
    )


def check_graphs(name: str, device: str) -> None:
    """Refuse named sizes of CUDA graphs with a backend whose decodes cannot be captured.

    Raises:
        ConfigError: Names the backends whose decodes can.
    """
    able = [row for row in backends_of(device) if row.has_graphs]
    if able and name != "auto" and not BACKENDS[name].has_graphs:
        raise ConfigError(
            f"cudagraph_capture_sizes is set, but attention_backend is {name}, which cannot run in CUDA graphs: leave "
            f"cudagraph_capture_sizes out, or set attention_backend to {_either(able)}"
        )


def _either(rows: list[AttentionBackendRow]) -> str:
    return f"{', '.join(row.name for row in rows)} or auto"
