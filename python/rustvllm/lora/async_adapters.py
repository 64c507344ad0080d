"""Adapters of an engine that runs by itself: ``AsyncAdapters`` loads them, ``AdapterMethods`` is what callers see.

The list of names is the engine's, so that several front ends have the same. Numbers in memory that the front ends of a
server share, one that each of them writes, say when it has changed: a front end looks at all of them before it reads a
name, and asks for the list only then. Of its own change it knows what it changed, and whether others came before it.
"""

import asyncio
import json
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Protocol

from rustvllm.config import EngineConfig
from rustvllm.config.hub.download import in_thread
from rustvllm.exceptions import EngineDeadError, InvalidRequestError, QueryError
from rustvllm.logger import init_logger
from rustvllm.lora import queries
from rustvllm.lora.registry import AdapterRegistry, LoadedAdapter
from rustvllm.lora.request import LoRARequest

logger = init_logger(__name__)

_VERSION_BITS: Final = 62
_LOOK_SECONDS: Final = 0.02
"""Between two looks at what another thread or process is to change."""


class AskEngines(Protocol):
    """Asks engines between two of their steps. Not kept, or the front end would stay."""

    def __call__(self, kind: str, payload: bytes, seconds: float, *, rank: int | None = None) -> Awaitable[bytes]:
        """Ask one engine, or all (None); the answer of the last."""


class AsyncAdapters:
    """The adapters that a front end on an event loop can name.

    Args:
        config: Of the engine.
        in_use: Numbers of the adapters that requests under way need.

    Attributes:
        registry: Which are loaded.
        versions: Shared by the front ends of a server: a number of each, which it changes with the list.
        own_version: Which of them is this one's.
    """

    def __init__(self, config: EngineConfig, in_use: Callable[[], set[int]]) -> None:
        self.registry = AdapterRegistry(config.lora, config.model.served_model_name, config.load.download_dir)
        self.versions, self.own_version = memoryview(array("q", [0])), 0
        self._is_served = config.lora is not None
        self._is_alone = config.parallel.data_parallel_size == 1
        self._in_use = in_use
        self._seen: bytes | None = None  # versions, when the registry was the engine's list
        self._num_changes = -1  # that it had had then
        self._refreshing, self._changing = asyncio.Lock(), asyncio.Lock()
        self._restoring: set[int] = set()  # ranks; written by other threads, whole changes at a time

    async def refresh(self, ask: AskEngines) -> None:
        """Ask for the list if it has changed; without an answer what was known stays.

        While an engine that was started again gets its adapters back, callers wait for that: it would say that there
        are none, and turn requests away that name one.
        """
        while self._restoring:  # noqa: ASYNC110 -- another thread empties it
            await asyncio.sleep(_LOOK_SECONDS)
        if not self._is_served or bytes(self.versions) == self._seen:
            return
        async with self._refreshing:
            versions = bytes(self.versions)
            if versions == self._seen:
                return
            try:
                answer = json.loads(await ask(queries.LIST, b"", queries.LIST_SECONDS, rank=0))
            except (QueryError, EngineDeadError) as error:
                logger.warning("cannot ask the engine for the list of adapters: %s", error)
                return
            self.registry.replace(answer["adapters"])
            self._seen, self._num_changes = versions, answer["num_changes"]

    async def load(self, request: LoRARequest, ask: AskEngines, *, may_crowd_out: bool = True) -> None:
        """Have an adapter loaded by every engine while these go on, unless it is.

        Args:
            request: Names it.
            ask: Asks the engines.
            may_crowd_out: With ``max_cpu_loras`` the least recently used one that no request needs makes room.

        Raises:
            InvalidRequestError: It cannot be served; the message says why.
            EngineDeadError: An engine has died.
        """
        await self.refresh(ask)
        if self.registry.find(request) is not None:
            return
        # May be a download: nothing else waits for it, not even the end of the program.
        folder = await asyncio.wrap_future(in_thread(lambda: self.registry.check(request), "rustvllm-adapter"))
        async with self._changing:
            await self.refresh(ask)
            if self.registry.find(request) is not None:  # loaded while this one waited
                return
            before = self.registry.named(request.lora_name)
            if before is None:
                crowded_out = self.registry.crowded_out(self._in_use(), may_crowd_out=may_crowd_out)
                if crowded_out is not None:
                    await self._withdraw(crowded_out, ask)
            loaded = LoadedAdapter(replace(request, lora_path=folder, load_inplace=False), self.registry.new_number())
            name, number = request.lora_name, loaded.number
            versions = bytes(self.versions)
            try:
                load: dict[str, Any] = {"number": number, "name": name, "path": folder}
                row = loaded.as_row() | {"load_inplace": request.load_inplace}
                if self._is_alone:  # each question waits for the end of a step
                    answer = await ask(queries.ADD, queries.payload(**load, row=row), queries.LOAD_SECONDS, rank=0)
                else:
                    await ask(queries.ADD, queries.payload(**load), queries.LOAD_SECONDS)
                    answer = await ask(queries.PUBLISH, queries.payload(**row), queries.LOAD_SECONDS, rank=0)
                published = json.loads(answer)
            except QueryError as error:
                await self._retire(number, ask)  # one of several engines may have it
                raise InvalidRequestError(str(error), "lora_request") from error
            self._announce()
            if versions == self._seen and published["num_changes"] == self._num_changes + 1:
                # Nobody else has changed the list: what it is now is known. Who does from now on changes a version.
                self.registry.put(loaded.request, number)
                own = self.versions.itemsize * self.own_version
                self._seen = versions[:own] + self._own() + versions[own + self.versions.itemsize :]
                self._num_changes += 1
            await self.refresh(ask)
            if published["replaced"] is not None and not self._is_alone:
                await self._retire(published["replaced"], ask)

    async def remove(self, lora_id: int, ask: AskEngines) -> bool:
        """Forget an adapter; False: there is none."""
        async with self._changing:
            await self.refresh(ask)
            found = next((each for each in self.registry.loaded() if each.request.lora_int_id == lora_id), None)
            return found is not None and await self._withdraw(found, ask)

    def number_of(self, request: LoRARequest) -> int:
        """The number of a loaded adapter.

        Raises:
            InvalidRequestError: It is not loaded any more.
        """
        found = self.registry.find(replace(request, load_inplace=False))
        if found is None:
            raise InvalidRequestError(
                f"the adapter {request.lora_name!r} was removed while the request was arriving", "lora_request"
            )
        return found.number

    @contextmanager
    def restoring(self, rank: int) -> Iterator[None]:
        """While the body runs an engine is connected to again and gets its adapters back; ``refresh`` waits."""
        self._restoring.add(rank)
        try:
            yield
        finally:
            self._restoring.discard(rank)

    def restore(self, rank: int, ask: Callable[[str, bytes], bytes]) -> None:
        """Give an engine that was started again what it had; blocks.

        A front end that has not seen the newest list leaves the list to one that has, and waits for that a while.

        Args:
            rank: Its rank; engine 0 has the list.
            ask: Asks it.
        """
        if not self._is_served:
            return
        has_changed = any(self.versions)
        if rank == 0 and has_changed and bytes(self.versions) != self._seen:
            self._wait_for_another(ask)
            return
        rows = []
        for row in [loaded.as_row() for loaded in self.registry.loaded()]:
            try:
                if not self.registry.is_from_start(row["number"]):
                    ask(queries.ADD, queries.payload(number=row["number"], name=row["name"], path=row["path"]))
                rows.append(row)
            except QueryError as error:
                logger.error("adapter %s could not be loaded again: %s", row["name"], error)  # noqa: TRY400
        if rank == 0 and has_changed:
            ask(queries.RESTORE, queries.payload(adapters=rows))
            self._announce()

    def _wait_for_another(self, ask: Callable[[str, bytes], bytes]) -> None:
        """Until a front end that knows the newest list has brought it."""
        give_up = time.monotonic() + queries.LIST_SECONDS
        while not json.loads(ask(queries.RESTORE, queries.payload(adapters=None))):
            if time.monotonic() >= give_up:
                logger.error(
                    "the engine was restarted without the adapters that were loaded at run time, because the API "
                    "process that loaded them is gone; load them again"
                )
                return
            time.sleep(_LOOK_SECONDS)

    async def _withdraw(self, loaded: LoadedAdapter, ask: AskEngines) -> bool:
        name = queries.payload(name=loaded.request.lora_name)
        number = json.loads(await ask(queries.WITHDRAW, name, queries.LOAD_SECONDS, rank=0))
        self._announce()
        await self.refresh(ask)
        if number is not None:
            await self._retire(number, ask)
        return number is not None

    async def _retire(self, number: int, ask: AskEngines) -> None:
        await ask(queries.RETIRE, queries.payload(number=number), queries.LOAD_SECONDS)

    def _announce(self) -> None:
        """The list has changed."""
        self.versions[self.own_version] = secrets.randbits(_VERSION_BITS) | 1

    def _own(self) -> bytes:
        return bytes(self.versions[self.own_version : self.own_version + 1])


class AdapterMethods:
    """vLLM's methods on adapters, for a class with :class:`AsyncAdapters`."""

    _adapters: AsyncAdapters

    async def _ask_engines(self, kind: str, payload: bytes, seconds: float, *, rank: int | None = None) -> bytes:
        """Ask one engine, or every one; the class that has adapters says how."""
        raise NotImplementedError

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter into every engine; requests name it by the same ``LoRARequest``.

        Returns:
            True; one that is loaded stays as it is, unless ``load_inplace`` asks for its folder to be read again.

        Raises:
            InvalidRequestError: It cannot be served; the message says why.
            EngineDeadError: An engine has died.
        """
        await self._adapters.load(lora_request, self._ask_engines)
        return True

    async def load_adapter(self, name: str, folder: str, *, load_inplace: bool) -> None:
        """Load an adapter under a name that a server's clients will use.

        Raises:
            InvalidRequestError: The name is taken, there is no room, or the adapter cannot be served.
            EngineDeadError: An engine has died.
        """
        await self.check_adapter_is_new(name, load_inplace=load_inplace)
        adapters = self._adapters
        before = adapters.registry.named(name)
        number = adapters.registry.new_number() if before is None else before.request.lora_int_id
        request = LoRARequest(name, number, folder, load_inplace=load_inplace)
        await adapters.load(request, self._ask_engines, may_crowd_out=False)

    async def check_adapter_is_new(self, name: str, *, load_inplace: bool) -> None:
        """Refuse what ``load_adapter`` would refuse before it looks at the adapter's files.

        Raises:
            InvalidRequestError: The name is taken, or there is no room.
        """
        adapters = self._adapters
        await adapters.refresh(self._ask_engines)
        if adapters.registry.named(name) is None:
            adapters.registry.crowded_out((), may_crowd_out=False)
        elif not load_inplace:
            raise InvalidRequestError(queries.already_loaded(name), "lora_name")

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapter of this ``lora_int_id``; requests under way keep it to their end. False: there is none."""
        return await self._adapters.remove(lora_id, self._ask_engines)

    async def list_loras(self) -> set[int]:
        """The ``lora_int_id`` of every adapter that is loaded."""
        await self._adapters.refresh(self._ask_engines)
        return {request.lora_int_id for request in self._adapters.registry.requests()}

    async def live_adapters(self, rank: int) -> tuple[list[str], list[str]] | None:
        """Names of the adapters of an engine's running and waiting requests; None: it does not say in time."""
        try:
            answer = await self._ask_engines(queries.LIVE, b"", queries.LIVE_SECONDS, rank=rank)
        except (QueryError, EngineDeadError):
            return None
        live = json.loads(answer)
        return live["running"], live["waiting"]

    async def refresh_adapters(self) -> None:
        """Learn what other front ends have loaded or removed; at once if they have not."""
        await self._adapters.refresh(self._ask_engines)

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """What is loaded, as far as is known here, by name."""
        return self._adapters.registry.by_name

    def share_adapter_versions(self, versions: Any, own: int) -> None:
        """Learn from these numbers, of which each front end of a server writes its own, when the list has changed."""
        self._adapters.versions, self._adapters.own_version = versions, own
