"""``Executor``: what the engine core needs in order to run a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import Any

    import numpy as np

    from rustvllm import _core
    from rustvllm.sample.grammar_output import GrammarOutput
    from rustvllm.worker.step_output import AsyncModelRunnerOutput


class Executor(Protocol):
    """Runs steps for the engine core.

    Call ``load_model``, ``determine_num_blocks``, ``determine_num_cpu_blocks``, ``initialize_kv_cache``,
    ``bind_token_ids`` and ``warm_up`` in this order, then ``execute_model`` and ``sample_tokens`` for each step.

    These two launch a step; ``get_output()`` of the object that ``sample_tokens`` returns waits for it. With
    ``async_scheduling`` the next step is launched before that wait, and −1 in its ``input_ids`` stands for tokens that
    the host does not know yet.
    """

    @property
    def forward_ns(self) -> int:
        """When the model began to run the last step (ns, monotonic); 0 if there was none, or if it is not measured."""

    @property
    def tower_ns(self) -> int:
        """Time of the last step in which features of images were computed, before its forward pass (ns)."""

    def load_model(self) -> None:
        """Prepare everything that does not depend on the number of blocks."""

    def determine_num_blocks(self) -> int:
        """The number of KV blocks, including the null block."""

    def determine_num_cpu_blocks(self, num_blocks: int) -> int:
        """The number of blocks in CPU memory for preempted requests; 0 unless preemption swaps."""

    def initialize_kv_cache(
        self,
        num_blocks: int,
        buffer_spec: Sequence[tuple[str, str, tuple[int, ...]]],
        num_sets: int,
        num_cpu_blocks: int = 0,
    ) -> list[dict[str, np.ndarray[Any, Any]]]:
        """Allocate the KV cache, its CPU tier and ``num_sets`` step-buffer sets; return the sets."""

    def bind_token_ids(
        self,
        token_ids: Callable[[int], list[int]],
        sampling_extras: Callable[[int], _core.SamplingExtras | None] | None = None,
        multimodal: Callable[[int], list[tuple[int, int, bytes, bytes]]] | None = None,
    ) -> None:
        """Set the functions that return the token ids of a row (``Scheduler.token_ids``), its list parameters
        (``Scheduler.sampling_extras``) and its images (``Scheduler.multimodal``).
        """

    def warm_up(self) -> None:
        """Do everything that would make the first step slower than later ones."""

    def add_adapter(self, number: int, name: str, path: str) -> None:
        """Load an adapter; requests name it by a number that no adapter had before; see ``AdapterStore.add``."""

    def prepare_adapter(self, number: int, name: str, path: str) -> Callable[[], None]:
        """Read an adapter, in any thread; call the returned function between two steps to let requests use it."""

    def lora_ranks(self) -> Mapping[int, int]:
        """The largest rank of each loaded adapter, by its number, if it is known."""

    def remove_adapter(self, number: int) -> bool:
        """Remove an adapter that no request needs; False if none has this number."""

    def execute_model(self, scheduler_output: _core.SchedulerOutput) -> None:
        """Run the step; ``sample_tokens`` must follow."""

    def forward_ns_left(self) -> int:
        """0 once the model has computed the executed step, so that waiting for masks delays it from then on; before
        that, nanoseconds until the next call. Called if some samples follow a grammar.
        """

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> AsyncModelRunnerOutput:
        """Sample from the step just executed; steps end in the order in which they were launched.

        Args:
            grammar_output: Masks for rows that follow grammars; None if every row may take every id.
        """

    def discard_step(self) -> None:
        """Forget the step that was executed but will not be sampled, and every launched step that was not awaited."""

    def watch(self, on_death: Callable[[], object]) -> None:
        """Call ``on_death``, in any thread, when a process ends that the executor needs."""

    def check(self) -> None:
        """Raise DeviceFailedError with the process and the reason if one has ended; called before every step."""

    def rank_states(self) -> list[dict[str, Any]]:
        """The state of each rank, rank 0 first, in the fields of ``RankView``; empty with one rank. From any thread."""

    def shutdown(self) -> None:
        """Free the memory."""
