"""``UniProcExecutor``: runs one worker in the process of the engine core."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rustvllm import _core
from rustvllm.worker.device_output import device_failed
from rustvllm.worker.model_runner import GPUModelRunner
from rustvllm.worker.prompt_images import MultimodalOfRow
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
"""Time between two polls of the device; waiting makes a step of 10 ms at most 3 % longer."""


class UniProcExecutor:
    """Runs the model of an engine in this process.

    Call ``load_model``, ``determine_num_blocks``, ``determine_num_cpu_blocks`` and ``initialize_kv_cache`` in this
    order, then per step ``execute_model`` and ``sample_tokens``.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config, _core.SAMPLING_FLOAT_COLUMNS, _core.SAMPLING_INT_COLUMNS)

    @property
    def device(self) -> torch.device:
        """The device that the model runs on."""
        return self._worker.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in; ``auto`` is resolved."""
        return self._worker.dtype

    @property
    def forward_ns(self) -> int:
        """When the model began to run the last step (ns, monotonic)."""
        return self._runner.forward_ns

    @property
    def tower_ns(self) -> int:
        """Time of the last step in which features of images were computed, before its forward pass (ns)."""
        return self._runner.tower_ns

    def load_model(self) -> None:
        """Load the weights.

        Raises:
            ModelLoadError: A file or the configuration is wrong; the message says which, and how to fix it.
        """
        self._worker.load_model()

    def determine_num_blocks(self) -> int:
        """The number of KV blocks, including the null block; see ``Worker.determine_num_blocks``.

        Raises:
            ModelLoadError: There is too little memory, or the configuration asks for more than there is.
        """
        return self._worker.determine_num_blocks()

    def determine_num_cpu_blocks(self, num_blocks: int) -> int:
        """The number of blocks in CPU memory for preempted requests; see ``Worker.determine_num_cpu_blocks``.

        Raises:
            ConfigError: ``swap_space`` is too small for one block, or more than there is.
        """
        return self._worker.determine_num_cpu_blocks(num_blocks)

    def initialize_kv_cache(
        self, num_blocks: int, buffer_spec: BufferSpec, num_sets: int, num_cpu_blocks: int = 0
    ) -> list[dict[str, np.ndarray[Any, Any]]]:
        """Allocate the KV cache, its CPU tier and ``num_sets`` step-buffer sets.

        Returns:
            The sets as numpy arrays, for ``_core.Scheduler``.
        """
        return self._worker.initialize_kv_cache(num_blocks, buffer_spec, num_sets, num_cpu_blocks)

    def bind_token_ids(
        self,
        token_ids: TokenIds,
        sampling_extras: ExtrasOfRow | None = None,
        multimodal: MultimodalOfRow | None = None,
    ) -> None:
        """Set the functions that return the token ids of a row (``Scheduler.token_ids``), for penalties, its list
        parameters (``Scheduler.sampling_extras``) and its images (``Scheduler.multimodal``).
        """
        self._runner.input_batch.token_ids = token_ids
        self._runner.input_batch.extras.of_row = sampling_extras
        if (images := self._runner.images) is not None:
            images.of_row, images.token_ids = multimodal, token_ids

    def warm_up(self) -> None:
        """Run a small step of every kind, so that no request waits for libraries to initialize; see ``Worker.warm_up``.

        Raises:
            ModelLoadError: A CUDA graph cannot be captured.
        """
        self._worker.warm_up()

    def add_adapter(self, number: int, name: str, path: str) -> None:
        """Load an adapter; see ``AdapterStore.add``.

        Raises:
            ModelLoadError: The adapter is of an unsupported kind, or made for another model.
            ConfigError: Adapters are not enabled, or the limit of loaded adapters is reached.
        """
        self._worker.adapters.add(number, name, Path(path))

    def prepare_adapter(self, number: int, name: str, path: str) -> Callable[[], None]:
        """Read an adapter in any thread; the returned function puts it into place; see ``AdapterStore.prepare``."""
        return self._worker.adapters.prepare(number, name, Path(path))

    def lora_ranks(self) -> Mapping[int, int]:
        """The largest rank of each loaded adapter, by its number."""
        return self._worker.adapters.lora_ranks

    def remove_adapter(self, number: int) -> bool:
        """Remove an adapter that no request needs; False if none has this number."""
        return self._worker.adapters.remove(number)

    def execute_model(self, scheduler_output: _core.SchedulerOutput) -> None:
        """Run the step through the model; ``sample_tokens`` must follow.

        Raises:
            DeviceMemoryError: The device has too little memory for this step; a smaller one may run.
            DeviceFailedError: The device failed, in this step or an earlier one, and cannot run another.
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
            DeviceMemoryError: See ``execute_model``.
        """
        try:
            return self._runner.sample_tokens(grammar_output)
        except torch.OutOfMemoryError as error:
            raise self._worker.out_of_memory(error, "sampling") from error
        except torch.AcceleratorError as error:
            raise device_failed(error) from error

    def discard_step(self) -> None:
        """Forget the step that was executed but will not be sampled, and every launched step that was not awaited."""
        self._runner.discard_step()

    def watch(self, on_death: Callable[[], object]) -> None:
        """See ``Executor``; there is no other process that could end."""

    def check(self) -> None:
        """See ``Executor``."""

    def rank_states(self) -> list[dict[str, Any]]:
        """See ``Executor``; there is only one rank."""
        return []

    def shutdown(self) -> None:
        """Free the model and the cache."""
        self._worker.shutdown()

    @property
    def _runner(self) -> GPUModelRunner:
        if self._worker.runner is None:
            raise RuntimeError("load_model must be called first")
        return self._worker.runner
