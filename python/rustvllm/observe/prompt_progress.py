"""``PromptProgress``: the progress bar that ``LLM`` shows while it generates."""

import time
from collections.abc import Callable
from typing import Any, Self

from rustvllm.outputs import RequestOutput


class PromptProgress:
    """A progress bar over prompts, with input and output tokens per second; does nothing if it is not wanted."""

    def __init__(self, total: int, wanted: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        if wanted and total:
            from tqdm import tqdm

            make = wanted if callable(wanted) else tqdm
            self._bar = make(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
        self._start = time.monotonic()
        self._num_input = self._num_output = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        """Count one finished prompt."""
        if self._bar is None:
            return
        self._num_input += len(output.prompt_ids)
        self._num_output += sum(len(sample.token_ids) for sample in output.outputs)
        elapsed = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_input / elapsed:.1f} tokens/s, output: {self._num_output / elapsed:.1f} tokens/s",
            refresh=False,
        )
        self._bar.update()
