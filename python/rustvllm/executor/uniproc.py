"""One worker in the process of the engine core."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rustvllm import _core
from rustvllm.worker.device_output import device_failed
from rustvllm.worker.model_runner import GPUModelRunner
from rustvllm.worker.row_extras import ExtrasOfRow
from rustvllm.worker.step_buffers import BufferSpec
from rustvllm.worker.token_counts import TokenIds
from rustvllm.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    import numpy as np

    from rustvllm.config import EngineConfig
    from rustvllm.sample.grammar_output import GrammarOutput
    from rustvllm.worker.step_output import AsyncModelRunnerOutput


_POLL_NS = 300_000
"""A step of 10 ms is at most 3 % longer while it waits for what the device is done with."""


class UniProcExecutor:
    """Runs the model of an engine in this process.

    Call ``load_model``, ``determine_num_blocks``, ``determine_num_cpu_blocks`` and ``initialize_kv_cache`` in this
    order, then per step ``execute_model`` and ``sample_tokens``.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config, _core.SAMPLING_FLOAT_COLUMNS, _core.SAMPLING_INT_COLUMNS)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._worker.device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in; ``auto`` is resolved."""
        return self._worker.dtype

    @property
    def forward_ns(self) -> int:
        """When the model began to run the last step (ns, monotonic)."""
        return self._runner.forward_ns

    def load_model(self) -> None:
        """Load the weights.

        Raises:
            ModelLoadError: A file or the configuration is wrong; the message says which, and what would work.
        """
        self._worker.load_model()

    def determine_num_blocks(self) -> int:
        """KV blocks, the null block included; see ``Worker.determine_num_blocks``.

        Raises:
            ModelLoadError: The memory is too small, or more was asked for than there is.
        """
        return self._worker.determine_num_blocks()

    def determine_num_cpu_blocks(self, num_blocks: int) -> int:
        """Blocks in CPU memory for preempted requests; see ``Worker.determine_num_cpu_blocks``.

        Raises:
            ConfigError: ``swap_space`` is too small for one block, or more than there is.
        """
        return self._worker.determine_num_cpu_blocks(num_blocks)

    def initialize_kv_cache(
        self, num_blocks: int, buffer_spec: BufferSpec, num_sets: int, num_cpu_blocks: int = 0
    ) -> list[dict[str, np.ndarray[Any, Any]]]:
        """Take the memory of the KV cache, of its CPU tier and of ``num_sets`` step-buffer sets.

        Returns:
            The sets as numpy sees them, for ``_core.Scheduler``.
        """
        return self._worker.initialize_kv_cache(num_blocks, buffer_spec, num_sets, num_cpu_blocks)

    def bind_token_ids(self, token_ids: TokenIds, sampling_extras: ExtrasOfRow | None = None) -> None:
        """Say where the tokens of a row come from (``Scheduler.token_ids``), which penalties need, and its parameters
        that are lists (``Scheduler.sampling_extras``).
        """
        self._runner.input_batch.token_ids = token_ids
        self._runner.input_batch.extras.of_row = sampling_extras

    def warm_up(self) -> None:
        """Run a small step of every kind, so that no request waits for libraries that set themselves up; see
        ``Worker.warm_up`` for what else.

        Raises:
            ModelLoadError: A CUDA graph cannot be captured.
        """
        self._worker.warm_up()

    def add_adapter(self, number: int, name: str, path: str) -> None:
        """Load an adapter; see ``AdapterStore.add``.

        Raises:
            ModelLoadError: It is not one that is served, or not this model's.
            ConfigError: Adapters are not enabled, or as many are loaded as may be.
        """
        self._worker.adapters.add(number, name, Path(path))

    def prepare_adapter(self, number: int, name: str, path: str) -> Callable[[], None]:
        """Read an adapter in any thread; what it returns puts it into place; see ``AdapterStore.prepare``."""
        return self._worker.adapters.prepare(number, name, Path(path))

    def lora_ranks(self) -> Mapping[int, int]:
        """The largest rank of each loaded adapter, by its number."""
        return self._worker.adapters.lora_ranks

    def remove_adapter(self, number: int) -> bool:
        """Forget an adapter that no request needs; False if there is none of this number."""
        return self._worker.adapters.remove(number)

    def execute_model(self, scheduler_output: _core.SchedulerOutput) -> None:
        """Run the step through the model; ``sample_tokens`` must follow.

        Raises:
            DeviceMemoryError: The device has no memory for it; the next step may be smaller.
            DeviceFailedError: The device failed, in this step or one before; there is no next one.
        """
        try:
            self._runner.execute_model(scheduler_output)
        except torch.OutOfMemoryError as error:
            num_tokens, num_reqs = scheduler_output.total_num_scheduled_tokens, scheduler_output.num_reqs
            raise self._worker.out_of_memory(error, f"a step of {num_tokens} tokens of {num_reqs} requests") from error
        except torch.AcceleratorError as error:
            raise device_failed(error) from error

    def forward_ns_left(self) -> int:
        """See ``Executor``."""
        return 0 if self._runner.is_forward_done() else _POLL_NS

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> AsyncModelRunnerOutput:
        """Sample from the step just executed.

        Args:
            grammar_output: See ``GPUModelRunner.sample_tokens``.

        Raises:
            DeviceMemoryError: As ``execute_model``.
        """
        try:
            return self._runner.sample_tokens(grammar_output)
        except torch.OutOfMemoryError as error:
            raise self._worker.out_of_memory(error, "sampling") from error
        except torch.AcceleratorError as error:
            raise device_failed(error) from error

    def discard_step(self) -> None:
        """Forget a step that was executed and will not be sampled, and every step that was launched and not awaited."""
        self._runner.discard_step()

    def watch(self, on_death: Callable[[], object]) -> None:
        """See ``Executor``; no other process can end here."""

    def check(self) -> None:
        """See ``Executor``."""

    def rank_states(self) -> list[dict[str, Any]]:
        """See ``Executor``; there is one rank."""
        return []

    def shutdown(self) -> None:
        """Let the model and the cache go."""
        self._worker.shutdown()

    @property
    def _runner(self) -> GPUModelRunner:
        if self._worker.runner is None:
            raise RuntimeError("load_model must be called first")
        return self._worker.runner
