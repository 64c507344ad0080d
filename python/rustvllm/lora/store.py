"""``AdapterStore``: the adapters that are in memory next to one model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rustvllm import _core
from rustvllm.exceptions import ConfigError
from rustvllm.logger import init_logger
from rustvllm.lora.layers import AdaptedLinear, AdapterStep, DecoderWithAdapters, LinearDelta, by_layer
from rustvllm.lora.modules import adaptable_linears, adaptable_parts
from rustvllm.lora.weights import read_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import numpy.typing as npt

    from rustvllm.config.lora import LoRAConfig
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

    Attributes:
        lora_ranks: The largest rank of each adapter that is loaded, by its number.

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
    ) -> None:
        self._model, self._config, self._dtype = model, config, dtype
        self._threads = threads
        self._step = AdapterStep()
        self._names: dict[int, str] = {}
        self.lora_ranks: dict[int, int] = {}
        self._layers: dict[int, AdaptedLinear] = {}
        self._parts = adaptable_parts(model)
        for linear in adaptable_linears(model):
            adapted = AdaptedLinear(linear, self._step, is_always_on=batch_invariant)
            linear.adapters = self._layers[id(linear)] = adapted
        if batch_invariant:
            # What runs the blocks in one call rounds otherwise than the modules: rows would tell who else is there.
            model.decoder_kernel = None
        self._decoder: DecoderWithAdapters | None = None
        if model.decoder_kernel is not None:
            model.decoder_kernel = self._decoder = DecoderWithAdapters(model.decoder_kernel, self._step)
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
            deltas = [matrices.as_delta() for matrices in read]
        made = {
            layer: LinearDelta(of_layer, self._dtype, self._threads) for layer, of_layer in by_layer(deltas).items()
        }
        size = sum(delta.nbytes for delta in made.values())
        about = f"{len(deltas)} modules, {size / 2**20:.1f} MiB, from {folder}"
        in_one_call = None if self._decoder is None else self._decoder.make_adapter(made)
        rank = max(matrices.down.shape[0] for matrices in read)
        return partial(self._install, number, name, made, in_one_call, rank, about)

    def _install(
        self,
        number: int,
        name: str,
        made: Mapping[int, LinearDelta],
        in_one_call: _core.CpuAdapter | None,
        rank: int,
        about: str,
    ) -> None:
        if number in self._names:
            return
        most = self._config.max_cpu_loras
        if most is not None and len(self._names) > most:  # one more than it says: what it takes the place of goes later
            raise ConfigError(
                f"adapter {name!r}: {len(self._names)} adapters are in memory and in use, and max_cpu_loras is {most}: "
                "raise it, or remove one"
            )
        for layer, delta in made.items():
            self._layers[layer].deltas[number] = delta
        if self._decoder is not None:
            self._decoder.put(number, in_one_call)
        self._names[number], self.lora_ranks[number] = name, rank
        logger.info("adapter %s: %s", name, about)

    def remove(self, number: int) -> bool:
        """Forget an adapter, which no request may need any more; False if there is none of this number."""
        if self._names.pop(number, None) is None:
            return False
        self.lora_ranks.pop(number, None)
        if self._decoder is not None:
            self._decoder.remove(number)
        for layer in self._layers.values():
            layer.deltas.pop(number, None)
        return True

    def begin_step(self, adapters: npt.NDArray[np.int64], query_start_loc: npt.NDArray[np.int32]) -> None:
        """Say which adapters the rows of the step have that runs next; see ``AdapterStep.begin``.

        Raises:
            RuntimeError: One of them is not loaded.
        """
        self._step.runs = ()
        if adapters.any():
            unknown = set(adapters.tolist()) - {0, *self._names}
            if unknown:
                raise RuntimeError(f"a request names adapter {min(unknown)}, which is not loaded")
            self._step.begin(adapters, query_start_loc)
