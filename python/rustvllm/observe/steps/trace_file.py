"""``StepTrace``: when each step of an engine was planned, launched, sampled and processed, as one JSON object per line.

``{"step":n,"schedule_ns":…,"launch_ns":…,"done_ns":…,"update_ns":…,"num_tokens":…,"num_reqs":…}``, with times in
nanoseconds of CLOCK_MONOTONIC: before the scheduler was called, when the executor got the step, when its samples had
arrived (or it had failed), and when the scheduler had processed them.
"""

from pathlib import Path

from rustvllm.exceptions import ConfigError
from rustvllm.logger import init_logger
from rustvllm.observe.steps.times import StepTimes
from rustvllm.process.private_file import open_private

logger = init_logger(__name__)

MAX_BUFFERED_STEPS = 4096
"""The most lines that are kept before they are written: about 600 KiB."""


class StepTrace:
    """Collects lines; writes them when there are many, when the engine is idle, and at the end."""

    def __init__(self, path: Path) -> None:
        """Begin an empty file.

        Raises:
            ConfigError: The file cannot be written.
        """
        self._path = path
        self._steps: list[StepTimes] = []
        try:
            self._file = open(path, "w", encoding="ascii", opener=open_private)  # noqa: SIM115 -- closed by close
        except OSError as error:
            raise ConfigError(f"step_trace_file {str(path)!r} cannot be written: {error.strerror}") from error

    def record(self, times: StepTimes) -> None:
        """Keep a step."""
        self._steps.append(times)
        if len(self._steps) >= MAX_BUFFERED_STEPS:
            self.flush()

    def flush(self) -> None:
        """Write the kept steps. A full disk ends the trace, not the engine."""
        steps, self._steps = self._steps, []
        if not steps or self._file.closed:
            return
        lines = [
            f'{{"step":{step.step},"schedule_ns":{step.schedule_ns},"launch_ns":{step.prepare_ns},'
            f'"done_ns":{step.done_ns},"update_ns":{step.end_ns},"num_tokens":{step.num_tokens},'
            f'"num_reqs":{step.num_reqs}}}\n'
            for step in steps
        ]
        try:
            self._file.writelines(lines)
            self._file.flush()
        except OSError as error:
            logger.error("step_trace_file %s ends here, because it cannot be written: %s", self._path, error.strerror)  # noqa: TRY400
            self._close()

    def close(self) -> None:
        """Write the rest; idempotent."""
        self.flush()
        self._close()

    def _close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # closing writes the buffered rest
            logger.debug("closing the step trace: %s", error)
