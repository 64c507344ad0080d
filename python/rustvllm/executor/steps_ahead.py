"""Steps that the stages before this rank's run already, and that this rank runs when their tokens are asked for."""

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
    """A step that was planned and has not run here.

    What the scheduler knows of rows that are new in it is asked for now: when it runs, their requests may have left
    them.

    Args:
        output: The plan.
        runner: That is to run it.

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
        """Within, the batch learns of new rows what was known when they were planned."""
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
    """What ``sample_tokens`` gives of such a step; see ``AsyncModelRunnerOutput``.

    Attributes:
        run: Runs it and gives its tokens.
    """

    run: Callable[[], ModelRunnerOutput]

    def is_done(self) -> bool:
        """It is never: it has not begun."""
        return False

    def get_output(self) -> ModelRunnerOutput:
        """Run it."""
        return self.run()
