"""``Inspection``: answers queries about an engine while it runs; queries and answers are JSON.

| kind | parameters | answer |
|---|---|---|
| ``state`` | ``since_step``, ``max_steps``, ``max_requests``, ``max_cells`` | counts, steps, requests, blocks, ranks |
| ``journey`` | ``do`` (``begin``, ``take``, ``end``), ``request_id``, ``since`` | the records of one request |
| ``ranks`` | none | the state of each rank |
| ``reset_prefix_cache`` | ``reset_running_requests`` | ``is_reset``: whether no block stayed in use |

``docs/dashboard.md`` describes the fields. Used only by the thread that steps, between two steps.
"""

import base64
import json
import os
from collections.abc import Mapping
from time import monotonic_ns
from typing import Any, Final, Protocol

from rustvllm import _core
from rustvllm.config import EngineConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.observe.engine_watch import EngineWatch
from rustvllm.observe.inspect.queries import Query, answer_with
from rustvllm.observe.inspect.request_watch import RequestWatch
from rustvllm.observe.inspect.step_summary import MAX_STEPS, StepSummary
from rustvllm.process.memory import resident_bytes

RESET_PREFIX_CACHE: Final = "reset_prefix_cache"
KINDS: Final = ("state", "journey", "ranks", RESET_PREFIX_CACHE)
MAX_REQUESTS: Final = 256
"""The most rows of requests in an answer."""
MAX_CELLS: Final = 65_536
"""The most cells of the block map."""
BLOCK_USES: Final = ("free", "used", "cached", "shared", "null")
"""The meanings of the bytes of the block map."""


class RankedExecutor(Protocol):
    """The part of an executor that an inspection reads."""

    def rank_states(self) -> list[dict[str, Any]]:
        """The state of each rank; see ``Executor``."""


class InspectedEngine(Protocol):
    """The part of an engine that an inspection reads."""

    config: EngineConfig
    scheduler: _core.Scheduler
    watch: EngineWatch
    num_blocks: int
    last_step_error: str | None

    @property
    def executor(self) -> RankedExecutor:
        """The engine's executor."""


class InspectedAdapters(Protocol):
    """The part of an engine's adapters that an inspection reads."""

    @property
    def names(self) -> Mapping[int, str]:
        """The name of each adapter, by its number."""

    def describe(self) -> list[dict[str, Any]]:
        """A row for each adapter."""


class Inspection:
    """Answers queries about an engine, and about its adapters if it has any."""

    def __init__(self, engine: InspectedEngine, adapters: InspectedAdapters | None = None) -> None:
        self._engine, self._adapters = engine, adapters
        self._steps = StepSummary(engine.watch)
        self._watch = RequestWatch(engine.watch)

    def answer(self, query: Query) -> None:
        """Answer a query, or say why it cannot be answered; the engine goes on in either case."""
        answer_with(query, lambda: json.dumps(self._answer(query), separators=(",", ":")).encode())

    def _answer(self, query: Query) -> dict[str, Any]:
        if query.kind not in KINDS:
            raise InvalidRequestError(f"there is no query {query.kind!r}; there are {', '.join(KINDS)}")
        try:
            wanted = json.loads(query.payload or b"{}")
        except ValueError as error:
            raise InvalidRequestError(f"the payload of the query {query.kind!r} is not JSON: {error}") from error
        if not isinstance(wanted, dict):
            raise InvalidRequestError(f"the payload of the query {query.kind!r} must be an object, got {wanted!r:.80}")
        if query.kind == "ranks":
            return {"ranks": self._engine.executor.rank_states()}
        if query.kind == RESET_PREFIX_CACHE:
            is_preempting = wanted.get("reset_running_requests") is True
            return {"is_reset": self._engine.scheduler.reset_prefix_cache(preempt_running=is_preempting)}
        return self._state(wanted) if query.kind == "state" else self._watch.answer(wanted)

    def _state(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        scheduler, config = self._engine.scheduler, self._engine.config
        max_requests = number(wanted, "max_requests", MAX_REQUESTS, MAX_REQUESTS)
        cells, blocks_per_cell, counts = scheduler.block_map(max(1, number(wanted, "max_cells", 4096, MAX_CELLS)))
        stats = scheduler.stats()
        return {
            "time_ns": monotonic_ns(),
            "limits": {
                "num_blocks": self._engine.num_blocks,
                "block_size": config.cache.block_size,
                "max_model_len": config.model.max_model_len,
                "max_num_seqs": config.scheduler.max_num_seqs,
                "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
                "async_scheduling": config.scheduler.async_scheduling,
            },
            "stats": stats,
            "steps": self._steps.state(
                number(wanted, "since_step", 0, 1 << 62), number(wanted, "max_steps", MAX_STEPS, MAX_STEPS)
            ),
            "requests": self._requests(max_requests),
            "adapters": [] if self._adapters is None else self._adapters.describe(),
            "blocks": {
                "uses": BLOCK_USES,
                "blocks_per_cell": blocks_per_cell,
                "counts": counts,
                "cells": base64.b64encode(cells).decode("ascii"),
            },
            "last_step_error": self._engine.last_step_error,
            "ranks": self._engine.executor.rank_states(),
            "process": {"pid": os.getpid(), "memory_bytes": resident_bytes()},
        }

    def _requests(self, limit: int) -> list[dict[str, Any]]:
        rows = self._engine.scheduler.request_summaries(limit)
        for row in rows:
            adapter = row["adapter"]
            row["adapter"] = None if self._adapters is None else self._adapters.names.get(adapter)
        return rows


def number(wanted: Mapping[str, Any], name: str, default: int, limit: int) -> int:
    """Read an integer from a query's parameters.

    Raises:
        InvalidRequestError: It is not an integer from 0 to ``limit``.
    """
    value = wanted.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise InvalidRequestError(f"{name} must be a whole number from 0 to {limit}, got {value!r:.80}", name)
    return value
