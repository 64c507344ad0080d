"""``EngineAdapters``: the adapters of an engine that runs by itself, as its front ends load, name and forget them.

Files are read in a thread of their own while the engine steps; between two steps an adapter is put into place. One
that is forgotten stays until no live request needs it, and a moment longer, since front ends in other processes may
have sent requests that have not arrived.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from rustvllm.config.lora import MAX_ADAPTERS
from rustvllm.exceptions import ConfigError, InvalidRequestError, RustVLLMError
from rustvllm.logger import init_logger
from rustvllm.lora import queries
from rustvllm.observe.inspect.queries import Query, answer_with

if TYPE_CHECKING:
    from rustvllm.engine.core import EngineCore

logger = init_logger(__name__)

GRACE_SECONDS: Final = 2.0
"""How long a forgotten adapter is kept for requests that are on their way."""


class EngineAdapters:
    """See the module. Belongs to the thread that steps the engine.

    Args:
        core: The engine.
    """

    def __init__(self, core: "EngineCore") -> None:
        self._executor, self._scheduler, self._wake = core.executor, core.scheduler, core.handle.wake
        self._config = core.config.lora
        self._list: dict[str, dict[str, Any]] = {}
        self._names: dict[int, str] = {}  # of all that are loaded, also of those that no list has any more
        self._is_as_started = True
        self._num_changes = 0  # of the list
        self._loading: list[tuple[Query, int, dict[str, Any] | None, Future[Callable[[], None]]]] = []
        self._retiring: dict[int, float] = {}  # number → when it may go at the earliest
        self._loader: ThreadPoolExecutor | None = None
        if self._config is None:
            return
        self._scheduler.add_adapter(0)
        for number, module in enumerate(self._config.modules, 1):
            self._scheduler.add_adapter(number)
            self._names[number] = module.name
            self._list[module.name] = {
                "number": number,
                "name": module.name,
                "path": module.path,
                "lora_int_id": number,
                "base_model_name": module.base_model_name,
            }

    def answer(self, query: Query) -> None:
        """Do what is asked. What cannot be loaded says why; the engine goes on."""
        answer_with(query, lambda: self._answer(query))

    def _answer(self, query: Query) -> bytes | None:
        if self._config is None:
            raise ConfigError("adapters need enable_lora")
        wanted = json.loads(query.payload or b"{}")
        if query.kind == queries.ADD:
            self._begin_load(query, wanted)
            return None  # once it is loaded
        return json.dumps(self._do(query.kind, wanted)).encode()

    def tend(self) -> None:
        """Put into place what has been read, and forget what no request needs; called after every step."""
        if self._loading:
            waiting, self._loading = self._loading, []
            for query, number, row, future in waiting:
                if future.done():
                    self._end_load(query, number, row, future)
                else:
                    self._loading.append((query, number, row, future))
        if self._retiring:
            now = monotonic()
            for number in [number for number, until in self._retiring.items() if until <= now]:
                self._remove(number)

    @property
    def names(self) -> Mapping[int, str]:
        """What each adapter is called, by its number; also of those that no list has any more."""
        return self._names

    def describe(self) -> list[dict[str, Any]]:
        """A row for each adapter that requests may name or still need: its name, its rank, how many requests it has."""
        if self._config is None:
            return []
        counts, ranks = self._scheduler.adapter_counts(), self._executor.lora_ranks()
        numbers = sorted({int(row["number"]) for row in self._list.values()} | counts.keys())
        rows = []
        for number in numbers:
            running, waiting = counts.get(number, (0, 0))
            rows.append(
                {
                    "name": self._names.get(number),
                    "rank": ranks.get(number),
                    "num_running": running,
                    "num_waiting": waiting,
                }
            )
        return rows

    def _do(self, kind: str, wanted: dict[str, Any]) -> Any:
        if kind == queries.LIST:
            return {"adapters": list(self._list.values()), "num_changes": self._num_changes}
        if kind == queries.RETIRE:
            self._retire(int(wanted["number"]))
            return True
        if kind == queries.WITHDRAW:
            self._is_as_started = False
            self._num_changes += 1
            row = self._list.pop(str(wanted["name"]), None)
            return None if row is None else row["number"]
        if kind == queries.PUBLISH:
            return self._publish(wanted)
        if kind == queries.LIVE:
            return self._live()
        return self._restore(wanted["adapters"])

    def _live(self) -> dict[str, list[str]]:
        """Names of the adapters of running requests, and of waiting ones; one that was read again has its name once."""
        running, waiting = (
            sorted({self._names[number] for number in numbers if number in self._names})
            for numbers in self._scheduler.live_adapters()
        )
        return {"running": running, "waiting": waiting}

    def _publish(self, row: dict[str, Any]) -> dict[str, Any]:
        load_inplace = row.pop("load_inplace")
        before = self._list.get(row["name"])
        if before is not None and not load_inplace:
            raise InvalidRequestError(queries.already_loaded(row["name"]), "lora_name")
        if before is None and len(self._list) >= MAX_ADAPTERS:
            raise InvalidRequestError(f"{len(self._list)} adapters are loaded, which is the limit: unload one first")
        self._is_as_started = False
        self._num_changes += 1
        self._list[row["name"]] = row
        return {"replaced": None if before is None else int(before["number"]), "num_changes": self._num_changes}

    def _restore(self, rows: list[dict[str, Any]] | None) -> bool:
        """Take the list that an engine had before it was started again; the first front end to bring it is heard.

        Args:
            rows: The list; None: only say whether another front end has brought it.

        Returns:
            Whether the list is another than at the start.
        """
        if rows is None or not self._is_as_started:
            return not self._is_as_started
        self._is_as_started = False
        self._num_changes += 1
        numbers = {row["number"] for row in rows}
        for row in self._list.values():
            if row["number"] not in numbers:
                self._retiring[row["number"]] = 0.0
        self._list = {row["name"]: row for row in rows}
        return True

    def _begin_load(self, query: Query, wanted: dict[str, Any]) -> None:
        number, name, path = int(wanted["number"]), str(wanted["name"]), str(wanted["path"])
        self._make_room()
        if self._loader is None:
            self._loader = ThreadPoolExecutor(1, thread_name_prefix="rustvllm-adapters")
        self._names[number] = name
        future = self._loader.submit(partial(self._executor.prepare_adapter, number, name, path))
        self._loading.append((query, number, wanted.get("row"), future))
        future.add_done_callback(lambda _: self._wake())

    def _end_load(
        self, query: Query, number: int, row: dict[str, Any] | None, future: "Future[Callable[[], None]]"
    ) -> None:
        try:
            future.result()()
        except RustVLLMError as error:
            self._names.pop(number, None)
            query.fail(str(error))
        except Exception as error:
            self._names.pop(number, None)
            logger.exception("an adapter could not be loaded")
            query.fail(f"loading failed: {type(error).__name__}: {error}")
        else:
            self._scheduler.add_adapter(number)
            try:
                published = None if row is None else self._publish(row)
            except RustVLLMError as error:
                query.fail(str(error))  # its front end has it forgotten
                return
            if published is not None and published["replaced"] is not None:
                self._retire(published["replaced"])
            query.answer(json.dumps(published).encode())

    def _make_room(self) -> None:
        """Where adapters in memory are limited, forgotten ones go before their time for one that is to come."""
        if self._config is not None and self._config.max_cpu_loras is not None:
            for number in list(self._retiring):
                self._remove(number)

    def _retire(self, number: int) -> None:
        self._retiring[number] = monotonic() + GRACE_SECONDS

    def _remove(self, number: int) -> None:
        if self._scheduler.remove_adapter(number):
            del self._retiring[number]
            self._names.pop(number, None)
            self._executor.remove_adapter(number)
