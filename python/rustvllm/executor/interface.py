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
    """Call ``load_model``, ``determine_num_blocks``, ``determine_num_cpu_blocks``, ``initialize_kv_cache``,
    ``bind_token_ids`` and ``warm_up`` in this order, then per step ``execute_model`` and ``sample_tokens``.

    These two launch a step; ``get_output()`` of what they return waits for it. With ``async_scheduling`` the next step
    is launched before that: its −1 in ``input_ids`` stand for tokens that the host does not know yet.
    """

    @property
    def forward_ns(self) -> int:
        """When the model began to run the last step (ns, monotonic); 0 if there was none or nothing is prepared."""

    def load_model(self) -> None:
        """Get ready what does not depend on the number of blocks."""

    def determine_num_blocks(self) -> int:
        """KV blocks, the null block included."""

    def determine_num_cpu_blocks(self, num_blocks: int) -> int:
        """Blocks in CPU memory for preempted requests; 0 unless preemption is by swap."""

    def initialize_kv_cache(
        self,
        num_blocks: int,
        buffer_spec: Sequence[tuple[str, str, tuple[int, ...]]],
        num_sets: int,
        num_cpu_blocks: int = 0,
    ) -> list[dict[str, np.ndarray[Any, Any]]]:
        """Take the memory of the cache, of its CPU tier and of ``num_sets`` step-buffer sets; return the sets."""

    def bind_token_ids(
        self,
        token_ids: Callable[[int], list[int]],
        sampling_extras: Callable[[int], _core.SamplingExtras | None] | None = None,
    ) -> None:
        """Say where the tokens of a row come from (``Scheduler.token_ids``), and its parameters that are lists
        (``Scheduler.sampling_extras``).
        """

    def warm_up(self) -> None:
        """Do what would make the first step slower than the others."""

    def add_adapter(self, number: int, name: str, path: str) -> None:
        """Load an adapter, which requests name by a number that no other has had; see ``AdapterStore.add``."""

    def prepare_adapter(self, number: int, name: str, path: str) -> Callable[[], None]:
        """Read an adapter, in any thread; what it returns makes it one that requests can name, between two steps."""

    def lora_ranks(self) -> Mapping[int, int]:
        """The largest rank of each loaded adapter, by its number, where it is known."""

    def remove_adapter(self, number: int) -> bool:
        """Forget an adapter that no request needs; False if there is none of this number."""

    def execute_model(self, scheduler_output: _core.SchedulerOutput) -> None:
        """Run the step; ``sample_tokens`` must follow."""

    def forward_ns_left(self) -> int:
        """0 once the model is done with the step that was executed, so that what is awaited for its samples costs time;
        before, nanoseconds until this should be asked again. Asked where some samples obey a grammar.
        """

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> AsyncModelRunnerOutput:
        """Sample from the step just executed; steps end in the order in which they were launched.

        Args:
            grammar_output: What rows that obey grammars may take; None: every row may take every id.
        """

    def discard_step(self) -> None:
        """Forget a step that was executed and will not be sampled, and every step that was launched and not awaited."""

    def watch(self, on_death: Callable[[], object]) -> None:
        """Call this, in whatever thread, when a process ends that the executor cannot do without."""

    def check(self) -> None:
        """Raise DeviceFailedError, naming process and reason, once one has; called before every step."""

    def rank_states(self) -> list[dict[str, Any]]:
        """How each of several ranks is, rank 0 first, as ``RankView`` names it; empty with one. From any thread."""

    def shutdown(self) -> None:
        """Give the memory back."""
