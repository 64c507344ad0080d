"""Types of the step channel and of the meeting of ranks in ``rustvllm._core``, which has no module of this name."""

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, final

import numpy as np
import numpy.typing as npt

from rustvllm._core import SchedulerOutput

class _Line(TypedDict):
    taken: int
    done: int
    failed: bool
    activity: int
    since_ns: int
    activity_ns: int
    activities: int
    value: int

@final
class StepWriter:
    """Rank 0's end: publishes commands and steps to the other ranks.

    One thread publishes; ``lines``, ``give_up`` and ``close`` may be called from any.
    """

    def __new__(cls, num_readers: int) -> StepWriter:
        """A channel of 1 to 63 readers; ValueError for another number, OSError without memory."""
    def fileno(self) -> int:
        """The descriptor that the other ranks inherit."""
    def register(self, sets: Iterable[Mapping[str, np.ndarray[Any, Any]]]) -> None:
        """Take the sets of step buffers that steps lie in; every command before must be done."""
    def publish(self, command: int, words: list[int], limit: float) -> int:
        """Publish a command with its numbers (unsigned, 64 bits); the frame's number.

        TimeoutError names the rank that has not taken an earlier frame within ``limit`` seconds; SchedulerStateError
        after ``give_up``.
        """
    def publish_step(self, command: int, output: SchedulerOutput, graph_size: int, limit: float) -> int:
        """Publish a step that the scheduler planned; the frame's number. Raises as ``publish`` does."""
    def wait_done(self, number: int, limit: float) -> None:
        """Wait until every rank did what a frame says. Raises as ``publish`` does."""
    def give_up(self) -> None:
        """End every wait of this side with an error, now and later."""
    def close(self) -> None:
        """Tell the other ranks that nothing more comes."""
    def lines(self) -> list[_Line]:
        """What each rank says of itself, from rank 1: the last frames that it took and did, whether it failed, a
        number for what it waits in (0: nothing) and since when (ns, monotonic), time (ns) and number of waits that
        ended, and what it answered to the last command.
        """
    @property
    def published(self) -> int:
        """The last frame that was published."""
    @property
    def blocked_seconds(self) -> float:
        """For how many seconds this side has waited for slots; it waits while one is waited for."""

@final
class NodeLink:
    """A connection between the head and another node of a model, whose other side has proved to know the secret.

    Both constructors take a connected TCP socket, which the caller still has to close, and raise PermissionError when
    the secrets differ, TimeoutError after ``limit`` seconds, ValueError when something else or another version is
    there, ConnectionError when the connection ends.
    """

    @staticmethod
    def welcome(fd: int, secret: bytes, limit: float) -> NodeLink:
        """The head's end."""
    @staticmethod
    def prove(fd: int, secret: bytes, limit: float) -> NodeLink:
        """A node's end."""
    @property
    def own_host(self) -> str:
        """This side's address on the connection."""
    def send(self, text: str) -> None:
        """Send a text; ConnectionError when the connection has ended."""
    def receive(self, limit: float) -> str | None:
        """Wait so many seconds for the next text; ConnectionError says why there will be none."""
    def lead(self, writer: StepWriter, first: int, count: int) -> None:
        """Have this node get every frame that the writer publishes; its ranks are ``first`` and ``count - 1`` after it.

        ValueError for ranks that the channel does not have, or after the first frame.
        """
    def follow(self, num_ranks: int) -> int:
        """Have a step channel for this node's ranks, into which comes what the head publishes; its descriptor."""
    def give_up(self) -> None:
        """End the channel of this node's ranks."""
    def close(self) -> None:
        """Say that nothing more comes from this side; what was sent arrives."""
    def cut(self) -> None:
        """End the connection on both sides."""

@final
class StepReader:
    """The end of a rank that follows. One thread reads."""

    def __new__(cls, fd: int, rank: int) -> StepReader:
        """The reader of ``rank``, from 1; ValueError for a descriptor of anything but a channel with such a rank."""
    def register(self, sets: Iterable[Mapping[str, np.ndarray[Any, Any]]]) -> None:
        """Take the sets of step buffers that steps are copied into."""
    def wait(self, limit: float) -> int | None:
        """Wait so many seconds for the next frame; its command, or None. ValueError for a frame that is not whole."""
    def words(self) -> list[int]:
        """The numbers of the frame that was waited for; it is taken."""
    def step(self) -> FollowedStep:
        """The step of the frame that was waited for, its arrays copied into the set that it names; it is taken."""
    def finish(self, value: int = 0) -> None:
        """What the last taken frame says is done, with this answer."""
    def fail(self) -> None:
        """This rank cannot follow any more."""
    def note_activity(self, activity: int) -> None:
        """Say what this rank waits in from now on; 0: in nothing."""
    @property
    def is_closed(self) -> bool:
        """Whether the writer said that nothing more comes."""

@final
class FollowedStep:
    """A step as a rank that follows sees it: the numbers of a ``SchedulerOutput``, and what all ranks do alike."""

    @property
    def graph_size(self) -> int:
        """Requests of the captured graph that it runs in; 0: it runs without."""
    @property
    def step(self) -> int: ...
    @property
    def buffer_index(self) -> int: ...
    @property
    def num_reqs(self) -> int: ...
    @property
    def total_num_scheduled_tokens(self) -> int: ...
    @property
    def max_num_scheduled_tokens(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def num_sampled(self) -> int: ...
    @property
    def num_logits(self) -> int: ...
    @property
    def num_prompt_logprobs_reqs(self) -> int: ...
    @property
    def num_prompt_logprobs(self) -> int: ...
    @property
    def num_new_reqs(self) -> int: ...
    @property
    def num_block_table_updates(self) -> int: ...
    @property
    def num_finished(self) -> int: ...
    @property
    def num_preempted(self) -> int: ...
    @property
    def num_structured_output_reqs(self) -> int: ...
    @property
    def num_swap_out(self) -> int: ...
    @property
    def num_swap_in(self) -> int: ...
    @property
    def num_copies(self) -> int: ...

@final
class RankMeeting:
    """Where the ranks of one machine add and gather numbers, in memory that they share; this is the first rank's end.

    Every rank makes the same calls in the same order. ``give_up`` may be called from any thread. A call raises
    TimeoutError, which names the rank that has not come within ``limit`` seconds; SchedulerStateError after
    ``give_up``, or when the ranks want different things.
    """

    def __new__(cls, num_ranks: int, *, spin_us: int = 50) -> RankMeeting:
        """A meeting of 2 to 64 ranks, who look for each other for ``spin_us`` before they sleep.

        ValueError for other numbers, OSError without memory.
        """
    @staticmethod
    def join(fd: int, rank: int, *, spin_us: int = 50) -> RankMeeting:
        """The end of ``rank``, from 1; ValueError for a descriptor of anything but a meeting with such a rank."""
    def fileno(self) -> int:
        """The descriptor that the other ranks inherit."""
    def all_reduce(self, data: npt.NDArray[Any], limit: float) -> None:
        """Let ``data``, float32 or bfloat16 seen as uint16, be the sum over all ranks.

        It is added in float32 in the order of ranks and rounded once, so its bits depend on nothing else.
        """
    def gather(
        self, own: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8] | None, limit: float, *, to_first: bool = False
    ) -> None:
        """Let ``out`` be what each rank has, in the order of ranks: on all of them, or on the first alone."""
    def give_up(self) -> None:
        """End every wait of every rank with an error, now and later."""
