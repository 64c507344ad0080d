"""``StateFeed``: what all engines say of themselves, asked once for all viewers, and not at all without one."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

import rustvllm
from rustvllm.exceptions import RustVLLMError
from rustvllm.logger import init_logger
from rustvllm.observe.metrics.history import INTERVAL_SECONDS, MetricsHistory
from rustvllm.process.health import EngineHealth
from rustvllm.process.memory import resident_bytes
from rustvllm.server.dashboard.seats import Seats
from rustvllm.server.state import ServedModel, ServerState, ServerStatus
from rustvllm.server.stream.sse import json_bytes

logger = init_logger(__name__)

POLL_SECONDS: Final = 0.4
METRICS_SECONDS: Final = 2.0
"""Between two readings of the counters while there are viewers."""
QUERY_SECONDS: Final = 2.0
"""How long an engine may take to answer: longer than most steps."""
MAX_VIEWERS: Final = 64
MAX_STEPS: Final = 96
"""Steps of one engine in one answer; the sums have all of them."""


class StateFeed:
    """Asks while there are viewers; each gets the newest answer when it has read the one before.

    A viewer that is slow misses answers and delays no other.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.seats = Seats(MAX_VIEWERS, f"The live page already has its maximum of {MAX_VIEWERS} viewers.")
        self._num_viewers = 0
        self._poller: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()
        self._version = 0
        self._newest, self._is_last = b"", False
        self._last_steps: dict[int, int] = {}
        self._began = time.monotonic()
        self._recent: dict[str, Any] | None = None
        self._recent_at = 0.0
        self.history = MetricsHistory()

    async def keep_history(self) -> None:
        """Read the counters every 15 seconds, with viewers or without, until the server stops: the work of a scrape."""
        while not self._is_over:
            try:
                engines = await self._state.model.engine.metrics()
                self.history.add(time.monotonic(), time.time(), engines)
            except RustVLLMError:  # no engine answers now
                logger.debug("cannot read counters for the history of the last hour", exc_info=True)
            await asyncio.sleep(INTERVAL_SECONDS)

    @property
    def num_viewers(self) -> int:
        """Who looks now."""
        return self._num_viewers

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events with the newest state, until the server stops or the viewer goes."""
        self._num_viewers += 1
        seen = 0
        try:
            if self._poller is None:
                self._version, self._last_steps = 0, {}
                self._poller = asyncio.create_task(self._poll())
            while True:
                async with self._news:
                    while self._version <= seen:
                        await self._news.wait()
                    seen, newest, is_last = self._version, self._newest, self._is_last
                yield newest
                if is_last:
                    return
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                self._rest()

    @property
    def _is_over(self) -> bool:
        return self._state.status in {ServerStatus.STOPPING, ServerStatus.DEAD}

    def _rest(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            self._poller = None

    async def _poll(self) -> None:
        while True:
            began, is_last = time.monotonic(), self._is_over
            try:
                newest = b"event: state\ndata: " + json_bytes(await self._ask()) + b"\n\n"
            except Exception:
                logger.exception("cannot read the state of the engines")
                newest, is_last = b"event: failed\ndata: {}\n\n", True  # viewers ask again
            async with self._news:
                self._version += 1
                self._newest, self._is_last = newest, is_last
                self._news.notify_all()
            await asyncio.sleep(max(0.05, POLL_SECONDS - (time.monotonic() - began)))

    async def _ask(self) -> dict[str, Any]:
        serves, health = self._state.health()
        model = self._state.model
        engines = await asyncio.gather(*(self._ask_engine(model, each) for each in model.engine.health()))
        now = time.monotonic()
        if self._recent is None or now - self._recent_at >= METRICS_SECONDS:
            self._recent, self._recent_at = self.history.recent(now, await model.engine.metrics()), now
        return {
            "server": {
                **health,
                "serves": serves,
                "status": self._state.status.value if self._is_over else health["status"],
                "models": model.names,
                "task": model.task,
                "version": rustvllm.__version__,
                "num_viewers": self._num_viewers,
                "max_model_len": model.max_model_len,
                "has_chat_template": model.has_own_chat_template,
                "uptime_seconds": round(now - self._began, 1),
                "process": {"pid": os.getpid(), "memory_bytes": resident_bytes()},
            },
            "engines": engines,
            "recent": self._recent,
        }

    async def _ask_engine(self, model: ServedModel, health: EngineHealth) -> dict[str, Any]:
        rank = health.rank
        about: dict[str, Any] = {"rank": rank, "death": health.death, "stalled_for": health.stalled_for}
        if health.death is not None:
            self._last_steps.pop(rank, None)
            return about
        question = {"since_step": self._last_steps.get(rank, 0), "max_steps": MAX_STEPS}
        try:
            answer = await model.engine.query("state", json.dumps(question).encode(), rank=rank, seconds=QUERY_SECONDS)
        except RustVLLMError as error:
            return {**about, "error": str(error)}
        state = json.loads(answer)
        with contextlib.suppress(IndexError):  # no step since the last time
            self._last_steps[rank] = state["steps"]["steps"][-1][0]
        return {**about, "state": state}
