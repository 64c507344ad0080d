"""What an ``AsyncLLM`` says of its engine, and what of it can be asked or forgotten while it runs."""

import asyncio
import json
from collections.abc import Generator
from typing import Any

from rustvllm import _core
from rustvllm.engine import pausing
from rustvllm.engine.configured import ConfiguredEngine
from rustvllm.engine.core_client.interface import AsyncEngineClient
from rustvllm.engine.output_handler import OutputHandler
from rustvllm.engine.request_table import RequestTable
from rustvllm.exceptions import EngineDeadError
from rustvllm.observe.inspect.description import describe_engine
from rustvllm.observe.inspect.inspection import RESET_PREFIX_CACHE
from rustvllm.observe.metrics.counters import EngineMetrics, read_metrics
from rustvllm.observe.metrics.stat_reporter import StatReporter
from rustvllm.parameter_checks import check_bool, check_number
from rustvllm.process.health import EngineHealth

STATS_TIMEOUT = 0.5
"""Seconds to wait for an engine's counters."""
QUERY_SECONDS = 2.0
"""Seconds to wait for what an engine says of itself."""
_RESET_SECONDS = 30.0
"""The same where it has something to do first: a step of a long prompt takes its time."""
_LOOK_SECONDS = 0.05
"""Between two looks whether requests are left."""


class Answered:
    """An answer that is there already, for callers that await it and for those that do not."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class AsyncState(ConfiguredEngine):
    """The methods, for a class with these attributes."""

    _client: AsyncEngineClient
    _requests: RequestTable
    _reporter: StatReporter | None
    _output_handler: OutputHandler
    _pauses: pausing.PauseOrders

    @property
    def errored(self) -> bool:
        """True when the engine has died."""
        return self._output_handler.broken is not None or self._client.errored

    def check_health(self) -> "Answered":
        """Do nothing while the engine lives; the answer may be awaited, as vLLM's is.

        Raises:
            EngineDeadError: It has died or was shut down; raised at once, awaited or not.
        """
        self._output_handler.check_health()
        return Answered()

    @property
    def is_running(self) -> bool:
        """True from the start until the engine dies or is shut down."""
        return self._output_handler.is_running

    @property
    def is_stopped(self) -> bool:
        """True when the engine has died or was shut down."""
        return not self.is_running

    @property
    def dead_error(self) -> EngineDeadError:
        """What :meth:`check_health` raises, to be raised by a caller that has seen ``errored``."""
        try:
            self.check_health()
        except EngineDeadError as error:
            return error
        return EngineDeadError("this engine is alive")

    def health(self) -> list[EngineHealth]:
        """The health of every engine, from its last heartbeat; sends nothing, so it may be called at any time."""
        return self._client.health()

    async def do_log_stats(self) -> None:
        """Have the stat loggers, the log's line among them, say now what the engine did since they last did."""
        self.check_health()
        if self._reporter is not None:
            await asyncio.to_thread(self._reporter.tell)

    def stats(self) -> dict[str, Any]:
        """Counters of the scheduler (from any thread), with ``num_gpu_blocks`` and ``block_size``.

        Those of an engine in another process are up to 0.2 s old; :meth:`current_stats` asks for new ones.
        """
        return self._with_sizes(self._client.handle.stats())

    async def current_stats(self) -> dict[str, Any]:
        """The same as of now, or as of the last heartbeat when an engine does not answer within half a second."""
        handle = self._client.handle
        if isinstance(handle, _core.EngineHandle):
            return self.stats()
        return self._with_sizes(await asyncio.to_thread(handle.stats, STATS_TIMEOUT))

    async def metrics(self) -> list[EngineMetrics]:
        """What every engine has counted by now; one that is dead, or silent for half a second, is left out."""
        handle = self._client.handle
        if isinstance(handle, _core.EngineHandle):
            return read_metrics(handle, 0.0)
        return await asyncio.to_thread(read_metrics, handle, STATS_TIMEOUT)

    async def query(self, kind: str, payload: bytes = b"", *, rank: int = 0, seconds: float = QUERY_SECONDS) -> bytes:
        """Ask the thread that steps an engine something about itself; it answers between two steps.

        Args:
            kind: What; ``observe/inspect/inspection.py`` has the kinds.
            payload: JSON, 64 KiB at most.
            rank: Which of several engines.
            seconds: How long to wait: a step of a long prompt takes its time.

        Raises:
            QueryTimeoutError: No answer came in time.
            QueryError: The question is wrong, or too many have no answer yet.
            EngineDeadError: That engine has died.
            IndexError: There is no such rank.
        """
        return await asyncio.to_thread(self._client.query, rank, kind, payload, seconds)

    async def _ask_engines(self, kind: str, payload: bytes, seconds: float, *, rank: int | None = None) -> bytes:
        answer = b""
        for each in range(len(self.health())) if rank is None else (rank,):
            answer = await self.query(kind, payload, rank=each, seconds=seconds)
        return answer

    def _with_sizes(self, counters: dict[str, int | float]) -> dict[str, Any]:
        return {
            **counters,
            "num_gpu_blocks": self._client.num_blocks,
            "block_size": self.config.cache.block_size,
        }

    def describe(self) -> list[str]:
        """Lines for the start-up message: model, device, KV cache, concurrency."""
        return describe_engine(self.config, self._client.num_blocks)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:  # noqa: ARG002 -- vLLM's signature
        """Forget what the prefix cache of every engine that lives holds.

        Args:
            reset_running_requests: Take the blocks of running requests, too; these are computed again.
            reset_connector: No effect: there is none.

        Returns:
            Whether all was forgotten: not while blocks are in use.

        Raises:
            InvalidRequestError: ``reset_running_requests`` is not True or False.
            QueryTimeoutError: An engine was in one step for half a minute.
            EngineDeadError: Every engine has died or was shut down.
        """
        check_bool("reset_running_requests", reset_running_requests)
        payload = json.dumps({"reset_running_requests": reset_running_requests}).encode()
        answers = await self._ask_living(RESET_PREFIX_CACHE, payload)
        return all(answer["is_reset"] for answer in answers.values())

    async def reset_mm_cache(self) -> None:
        """Do nothing: images are processed anew for each request; ``docs/vision.md`` says what the worker keeps."""

    async def reset_encoder_cache(self) -> None:
        """Do nothing: models have no encoder, so no cache of its outputs exists."""

    async def is_sleeping(self) -> bool:
        """False: an engine cannot sleep."""
        return False

    async def pause_generation(self, *, mode: pausing.PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pause every engine until :meth:`resume_generation`: requests that come meanwhile wait.

        They count towards the limits of the queue, and ``queue_timeout`` ends them as ever. Returns when nothing runs
        any more. If this is cancelled, the pause remains. Of several engines one that is dead is passed over; the
        engine that is started in its place is paused from its start.

        Args:
            mode: What becomes of the requests in flight, those of other front ends included. ``abort`` ends them, with
                all that wait; ``wait`` lets them run to their ends; ``keep`` leaves them as they are, and they go on
                when the pause ends.
            clear_cache: Forget then what the prefix caches hold. Requests that are kept are computed again.

        Raises:
            InvalidRequestError: An argument is wrong.
            QueryTimeoutError: An engine was in one step for half a minute.
            EngineDeadError: Every engine has died or was shut down.
        """
        pausing.check_mode(mode)
        check_bool("clear_cache", clear_cache)
        states = await self._ask_pauses(pausing.PAUSE, json.dumps({"mode": mode}).encode())
        while any(state["is_paused"] and not state["is_at_rest"] for state in states):
            await asyncio.sleep(_LOOK_SECONDS)
            states = await self._ask_pauses(pausing.PAUSE_STATE)
        if clear_cache and all(state["is_paused"] for state in states):
            await self.reset_prefix_cache(reset_running_requests=True)

    async def resume_generation(self) -> None:
        """End the pause of every engine; engines that are not paused run on.

        Raises:
            QueryTimeoutError: An engine was in one step for half a minute.
            EngineDeadError: Every engine has died or was shut down.
        """
        await self._ask_pauses(pausing.RESUME)

    async def is_paused(self) -> bool:
        """Whether every engine that lives is paused; errors as for :meth:`resume_generation`."""
        return all(state["is_paused"] for state in await self._ask_pauses(pausing.PAUSE_STATE))

    async def _ask_pauses(self, kind: str, payload: bytes = b"") -> list[dict[str, bool]]:
        """Ask every engine that lives. What the others miss, those that are started in their places are asked."""
        answers = await self._ask_living(kind, payload)
        if kind != pausing.PAUSE_STATE:
            for rank in set(range(len(self.health()))).difference(answers):
                self._pauses.miss(rank, (kind, payload))
            await self.current_stats()  # from now on it is known of an engine that dies
        return list(answers.values())

    async def _ask_living(self, kind: str, payload: bytes) -> dict[int, Any]:
        """The JSON answer of each engine that lives, by rank.

        Raises:
            QueryError: One that lives does not answer.
            EngineDeadError: None lives.
        """
        self.check_health()
        ranks = range(len(self.health()))
        asked = (self.query(kind, payload, rank=rank, seconds=_RESET_SECONDS) for rank in ranks)
        answers = {}
        for rank, answer in enumerate(await asyncio.gather(*asked, return_exceptions=True)):
            if isinstance(answer, bytes):
                answers[rank] = json.loads(answer)
            elif not isinstance(answer, EngineDeadError):
                raise answer
        self.check_health()  # the last one may have died meanwhile
        return answers

    async def is_tracing_enabled(self) -> bool:
        """Whether spans of requests go to an endpoint of OpenTelemetry."""
        return self.config.tracing.otlp_endpoint is not None

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the engine does: ``generate``, ``embed`` or ``classify``."""
        return (self.config.model.task,)

    def get_num_unfinished_requests(self) -> int:
        """Requests of this front end that are still without their last output."""
        return len(self._requests)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until no request of this front end is left.

        Args:
            drain_timeout: How long, in seconds.

        Raises:
            TimeoutError: Some are left.
            EngineDeadError: The engine has died or was shut down.
        """
        check_number("drain_timeout", drain_timeout, 0, float("inf"))
        loop = asyncio.get_running_loop()
        give_up = loop.time() + drain_timeout
        while True:
            self.check_health()
            if not self._requests:
                return
            if loop.time() >= give_up:
                raise TimeoutError(f"{len(self._requests)} requests were left after {drain_timeout:g} s")
            await asyncio.sleep(_LOOK_SECONDS)
