"""Steps that earlier pipeline stages already run, and that this rank runs only when their tokens are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rustvllm import _core
    from rustvllm.worker.model_runner import GPUModelRunner
    from rustvllm.worker.step_output import ModelRunnerOutput


class StepAhead:
    """A step that is planned but has not run on this rank.

    It asks the scheduler for the ids and extras of new rows when it is made, because their requests may have left the
    rows when it runs.

    Args:
        output: The plan.
        runner: The runner that will run it.

    Attributes:
        output: As given.
    """

    def __init__(self, output: _core.SchedulerOutput, runner: GPUModelRunner) -> None:
        self.output = output
        batch = runner.input_batch
        self._batch = batch
        self._ids: dict[int, list[int]] = {}
        self._extras: dict[int, _core.SamplingExtras | None] = {}
        arrays = runner.step_buffers[output.buffer_index].arrays
        for row in arrays["new_rows"][: output.num_new_reqs].tolist():
            if batch.token_ids is not None:
                self._ids[row] = batch.token_ids(row)
            if batch.extras.of_row is not None:
                self._extras[row] = batch.extras.of_row(row)

    @contextmanager
    def rows_as_planned(self) -> Iterator[None]:
        """Within the context, new rows get the ids and extras that they had when the step was planned."""
        batch = self._batch
        before = batch.token_ids, batch.extras.of_row
        if before[0] is not None:
            batch.token_ids = self._ids.__getitem__
        if before[1] is not None:
            batch.extras.of_row = self._extras.__getitem__
        try:
            yield
        finally:
            batch.token_ids, batch.extras.of_row = before


@dataclass(frozen=True, slots=True)
class AwaitedStep:
    """The output that ``sample_tokens`` returns for these steps; see ``AsyncModelRunnerOutput``.

    Attributes:
        run: Runs the step and returns its output.
    """

    run: Callable[[], ModelRunnerOutput]

    def is_done(self) -> bool:
        """Always False: the step begins only in ``get_output``."""
        return False

    def get_output(self) -> ModelRunnerOutput:
        """Run the step."""
        return self.run()
