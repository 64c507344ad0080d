"""``HandEngine``: a scheduler without a model, driven step by step.

Its "model" gives at position p of a request whose prompt begins with token t the token ``1000 · t + p``: a request's
tokens thus show whether one was lost, doubled, delivered to another request or out of order. Positions are those of the
step arrays.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rustvllm import _core

Ids = npt.NDArray[np.int32]


def make_scheduler(**numbers: Any) -> _core.Scheduler:
    """A scheduler over arrays of its own: 63 blocks of 16 tokens, unless told otherwise."""
    return _core.Scheduler(_core.SchedulerConfig(**({"num_blocks": 64, "max_model_len": 256} | numbers)))


def tokens(output: _core.SchedulerOutput, token_id: int = 7) -> Ids:
    """The same token for every sampled row."""
    return np.full((output.num_sampled, 1), token_id, np.int32)


class HandEngine:
    """See the module.

    Attributes:
        scheduler: the core.
        in_flight: steps that are scheduled and not updated, oldest first, with what they sample.
        outputs: per key, the records that came out.
    """

    def __init__(self, **numbers: Any) -> None:
        self.scheduler = make_scheduler(**numbers)
        self.in_flight: deque[tuple[_core.SchedulerOutput, Ids]] = deque()
        self.outputs: dict[int, list[dict[str, Any]]] = {}
        self._requests: dict[int, tuple[list[int], int]] = {}  # key -> prompt, max_tokens

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **params: Any) -> int:
        """Hand in a request; its key."""
        key = self.scheduler.add_request(request_id, list(prompt), max_tokens=max_tokens, **params)
        self._requests[key] = list(prompt), max_tokens
        for sample, _, _ in params.get("samples", ()):
            self._requests[sample] = self._requests[key]
        return key

    def schedule(self) -> _core.SchedulerOutput | None:
        """Plan a step and compute what it samples."""
        output = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if output is not None:
            arrays = self.arrays(output)
            positions = arrays["positions"][arrays["logits_indices"][: output.num_logits]] + 1
            rows = arrays["sampled_rows"][: output.num_sampled].tolist()
            first = np.array([self.scheduler.token_ids(row)[0] for row in rows], np.int32)
            self.in_flight.append((output, (1000 * first + positions)[:, None].astype(np.int32)))
        return output

    def step(self) -> _core.SchedulerOutput:
        """Plan a step that there must be, and update it, with nothing else in flight."""
        output = self.schedule()
        assert output is not None
        self.update()
        return output

    def update(self) -> int:
        """Update the oldest step in flight; how many requests finished."""
        output, sampled = self.in_flight.popleft()
        finished = self.scheduler.update_from_output(output, sampled)
        self.scheduler.check_invariants()
        self.take_outputs()  # the egress has room for some steps only; what does not fit counts as unfinished
        return finished

    def arrays(self, output: _core.SchedulerOutput) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a step."""
        return dict(self.scheduler.step_buffers[output.buffer_index])

    def state(self, request_id: str) -> dict[str, Any]:
        """State of a request that must be live."""
        state = self.scheduler.request_state(request_id)
        assert state is not None
        return state

    def take_outputs(self) -> None:
        """File what came out under its key."""
        for record in self.scheduler.take_outputs():
            self.outputs.setdefault(record["key"], []).append(record)

    def finish(self, max_steps: int = 2000, aborted: Sequence[int] = ()) -> None:
        """Run to the end, with as many steps in flight as there may be, and check every token of every request.

        Args:
            max_steps: more than this means no progress.
            aborted: keys of requests that were aborted: what they got must be the beginning of what was due.
        """
        depth = self.scheduler.config.max_steps_in_flight
        for _ in range(max_steps):
            while len(self.in_flight) < depth and self.schedule() is not None:
                pass
            if not self.in_flight:
                break
            self.update()
        assert not self.scheduler.has_unfinished_requests()
        self.take_outputs()
        for key, (prompt, max_tokens) in self._requests.items():
            records = self.outputs[key]
            got = [record["new_token_id"] for record in records if record["new_token_id"] is not None]
            due = [1000 * prompt[0] + len(prompt) + i for i in range(max_tokens)]
            reasons = [record["finish_reason"] for record in records]
            assert reasons[:-1] == [None] * (len(records) - 1), "only the last record ends a request"
            if key in aborted:
                assert got == due[: len(got)]
                assert reasons[-1] == "abort"
            else:
                assert got == due
                assert reasons[-1] == "length"
        self.check_idle()

    def check_idle(self) -> None:
        """Every block that is held has an owner."""
        self.scheduler.check_invariants()
        stats = self.scheduler.stats()
        assert stats["num_free_blocks"] == stats["num_usable_blocks"]
        assert stats["num_free_cpu_blocks"] == self.scheduler.config.num_cpu_blocks
        assert self.scheduler.queues() == {"waiting": [], "running": [], "leaving": []}
