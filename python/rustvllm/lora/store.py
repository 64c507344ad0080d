"""``AdapterStore``: the adapters that are in memory next to one model."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rustvllm import _core
from rustvllm.exceptions import ConfigError
from rustvllm.layers.fused import runs_fused_on
from rustvllm.logger import init_logger
from rustvllm.lora.device_table import DeviceTable, Send, TableDelta
from rustvllm.lora.layers import AdaptedDecoder, AdaptedLinear, AdapterStep, LinearDelta, by_layer
from rustvllm.lora.modules import adaptable_linears, adaptable_parts
from rustvllm.lora.static_adapters import StaticAdapters
from rustvllm.lora.weights import digest_of, read_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from rustvllm.config.lora import LoRAConfig
    from rustvllm.layers.linear import Linear
    from rustvllm.lora.weights import ModuleDelta
    from rustvllm.models.interface import CausalLM

logger = init_logger(__name__)


class AdapterStore:
    """Adds adapters to a filled model. Belongs to the thread that runs it.

    Args:
        model: Its dense layers have their kernels; they learn of the adapters here.
        config: How many, and of which rank.
        dtype: Of the model.
        threads: What the core computes with; None: torch computes.
        batch_invariant: A row's bits depend on no other.
        send: Brings an array of the host to the model's device, in the order of what computes there.

    Attributes:
        lora_ranks: The largest rank of each adapter that is loaded, by its number.
        digests: What :func:`~rustvllm.lora.weights.digest_of` says of each; empty unless ranks share layers.

    Raises:
        ModelLoadError: One of ``config.modules`` is wrong.
    """

    def __init__(
        self,
        model: CausalLM,
        config: LoRAConfig,
        dtype: torch.dtype,
        threads: _core.CpuThreads | None,
        *,
        batch_invariant: bool,
        send: Send = torch.from_numpy,
    ) -> None:
        self._model, self._config, self._dtype = model, config, dtype
        self._threads = threads
        # What is packed leaves a shape, on the meta device.
        self._device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
        self._step = AdapterStep()
        self._names: dict[int, str] = {}
        self.lora_ranks: dict[int, int] = {}
        self.digests: dict[int, int] = {}
        self._layers: dict[int, AdaptedLinear] = {}
        self._parts = {name: part for name, part in adaptable_parts(model).items() if part.linear.takes_adapters}
        self._kept: dict[int, torch.dtype] = {}
        for linear in filter(attrgetter("takes_adapters"), adaptable_linears(model)):
            by_kernel = threads is None and runs_fused_on(self._device)  # whose matrices have the type of the rows
            self._kept[id(linear)] = dtype if by_kernel else _kept(config.dtype, linear, dtype)
            adapted = AdaptedLinear(linear, self._step, is_always_on=batch_invariant)
            linear.adapters = self._layers[id(linear)] = adapted
        if batch_invariant:
            # What runs the blocks in one call rounds otherwise than the modules: rows would tell who else is there.
            model.decoder_kernel = None
        kernel = model.decoder_kernel
        self._decoder = None if kernel is None else AdaptedDecoder(kernel, self._step)
        self._table: DeviceTable | None = None
        if threads is None and runs_fused_on(self._device):
            if config.dtype not in ("auto", str(dtype).removeprefix("torch.")):
                raise ConfigError(
                    f"lora_dtype is {config.dtype}, but on a GPU adapters have the model's dtype, "
                    f"{str(dtype).removeprefix('torch.')}: leave it out"
                )
            self._step.table = self._table = DeviceTable(self._widths(), send)
        for number, module in enumerate(config.modules, 1):
            self.add(number, module.name, Path(module.path))

    def __len__(self) -> int:
        return len(self._names)

    def add(self, number: int, name: str, folder: Path) -> None:
        """Load an adapter.

        Args:
            number: What requests say; never given to another.
            name: For messages.
            folder: As peft's ``save_pretrained`` writes it.

        Raises:
            ModelLoadError: It is not one that is served, or not this model's.
            ConfigError: As many are loaded as may be.
        """
        self.prepare(number, name, folder)()

    def prepare(self, number: int, name: str, folder: Path) -> Callable[[], None]:
        """Read an adapter, in any thread, while the model runs; arguments and errors as for :meth:`add`.

        Returns:
            What puts it into place, for the thread that runs the model; it raises ``ConfigError`` if there is no room.
        """
        with torch.inference_mode():
            read = read_adapter(name, folder, self._model, self._parts, self._config.max_lora_rank)
            deltas = by_layer([matrices.as_delta() for matrices in read])
            install, size = self._make(name, number, deltas)
        about = f"{len(read)} modules, {size / 2**20:.1f} MiB, from {folder}"
        rank = max(matrices.down.shape[0] for matrices in read)
        digest = digest_of(read) if any(part.shard is not None for part in self._parts.values()) else None
        return partial(self._install, number, name, install, rank, digest, about)

    def _make(
        self, name: str, number: int, deltas: Mapping[int, Sequence[ModuleDelta]]
    ) -> tuple[Callable[[], object], int]:
        """The products where they are computed, by the ``id`` of the layer: what puts them into place, and their bytes.

        Raises:
            ConfigError: The device has no memory for them.
        """
        if self._table is not None:
            try:
                placed = {layer: TableDelta(each, self._dtype, self._device) for layer, each in deltas.items()}
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"adapter {name!r}: {self._device} is out of memory ({str(error).splitlines()[0]}); remove another "
                    "adapter, or lower gpu_memory_utilization"
                ) from error
            return partial(self._table.put, number, placed), sum(delta.nbytes for delta in placed.values())
        made = {
            layer: LinearDelta(each, self._dtype, self._kept[layer], self._threads, self._device)
            for layer, each in deltas.items()
        }
        in_one_call = None if self._decoder is None else self._decoder.make_adapter(made)
        return partial(self._put, number, made, in_one_call), sum(delta.nbytes for delta in made.values())

    def _put(self, number: int, made: Mapping[int, LinearDelta], in_one_call: _core.CpuAdapter | None) -> None:
        for layer, delta in made.items():
            self._layers[layer].deltas[number] = delta
        if self._decoder is not None:
            self._decoder.put(number, in_one_call)

    def _widths(self) -> dict[int, tuple[int, int]]:
        """Of each layer, by its ``id``: how many parts it has, and the outputs of the widest."""
        outputs: dict[int, list[int]] = {}
        for part in self._parts.values():
            outputs.setdefault(id(part.linear), []).append(part.num_outputs)
        return {layer: (len(of_parts), max(of_parts)) for layer, of_parts in outputs.items()}

    def _install(
        self, number: int, name: str, install: Callable[[], object], rank: int, digest: int | None, about: str
    ) -> None:
        if number in self._names:
            return
        most = self._config.max_cpu_loras
        if most is not None and len(self._names) > most:  # one more than it says: what it takes the place of goes later
            raise ConfigError(
                f"adapter {name!r}: {len(self._names)} adapters are in memory and in use, and max_cpu_loras is {most}: "
                "raise it, or remove one"
            )
        install()
        self._names[number], self.lora_ranks[number] = name, rank
        if digest is not None:
            self.digests[number] = digest
        logger.info("adapter %s: %s", name, about)

    def remove(self, number: int) -> bool:
        """Forget an adapter, which no request may need any more; False if there is none of this number."""
        if self._names.pop(number, None) is None:
            return False
        self.lora_ranks.pop(number, None)
        self.digests.pop(number, None)
        if self._decoder is not None:
            self._decoder.remove(number)
        if self._table is not None:
            self._table.remove(number)
        for layer in self._layers.values():
            layer.deltas.pop(number, None)
        return True

    def bytes_to_come(self) -> int:
        """What adapters of the largest rank may yet take: as many as may be in memory, or else run at once."""
        config = self._config
        num_more = max((config.max_cpu_loras or config.max_loras) - len(self._names), 0)
        # Down to the ranks each layer has its inputs for every part, up from them each part has its outputs.
        numbers = sum(sum(part.own_shape) for part in self._parts.values()) * config.max_lora_rank
        return num_more * numbers * self._dtype.itemsize

    def warm_up(self) -> None:
        """Run every kind of product once, so that no request waits for a compiler; nothing is added."""
        if self._table is not None:
            self._table.warm_up([layer.linear for layer in self._layers.values()], self._dtype, self._device)

    @property
    def is_on(self) -> bool:
        """Whether the step that runs has adapters."""
        return bool(self._step.runs)

    def begin_step(self, adapters: npt.NDArray[np.int64], query_start_loc: npt.NDArray[np.int32]) -> None:
        """Say which adapters the rows of the step have that runs next; see ``AdapterStep.begin``.

        Raises:
            RuntimeError: One of them is not loaded.
        """
        self._step.runs = ()
        if adapters.any():
            unknown = set(adapters.tolist()).difference(self._names, (0,))
            if unknown:
                raise RuntimeError(f"a request names adapter {min(unknown)}, which is not loaded")
            self._step.begin(adapters, query_start_loc)

    def stage_step(self, stage: Send | None) -> None:
        """Bring to the device what the step needs unless it runs in a graph; see ``AdapterStep.stage``."""
        if self._step.runs:
            self._step.stage(stage)

    @property
    def make_static(self) -> Callable[[int], StaticAdapters] | None:
        """Makes what graphs of at most so many tokens read of a step's adapters; None: such steps have no graphs."""
        return None if self._table is None else partial(self._static, self._table)

    def _static(self, table: DeviceTable, max_tokens: int) -> StaticAdapters:
        max_loras, max_rank = self._config.max_loras, self._config.max_lora_rank
        return StaticAdapters(
            self._step, table, max_loras=max_loras, max_rank=max_rank, max_tokens=max_tokens, device=self._device
        )


def _kept(name: str, linear: Linear, dtype: torch.dtype) -> torch.dtype:
    """What the matrices for a layer are kept in: over weights of 8 bits or fewer 16 bits are more exact than these."""
    if name != "auto":
        return torch.float32 if name == "float32" else torch.bfloat16
    kernel = linear.kernel
    is_quantized = kernel is not None and 0 < kernel.nbytes < 1.5 * linear.weight.numel()
    return torch.bfloat16 if is_quantized else dtype
