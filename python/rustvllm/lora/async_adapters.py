"""Adapters of an engine that runs by itself: ``AsyncAdapters`` loads them, ``AdapterMethods`` is what callers see."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rustvllm.config import EngineConfig
from rustvllm.exceptions import InvalidRequestError, QueryError
from rustvllm.lora import queries
from rustvllm.lora.registry import AdapterRegistry
from rustvllm.lora.request import LoRARequest

AskEngines = Callable[[str, bytes, float], Awaitable[None]]
"""Asks every engine: kind, payload, and the seconds to wait for an answer. Not kept, or the front end would stay."""


class AsyncAdapters:
    """The adapters that a front end on an event loop can name.

    Args:
        config: Of the engine.
        in_use: Numbers of the adapters that requests under way need.

    Attributes:
        registry: Which are loaded.
    """

    def __init__(self, config: EngineConfig, in_use: Callable[[], set[int]]) -> None:
        self.registry = AdapterRegistry(config.lora, config.model.served_model_name)
        self._in_use = in_use
        self._retired: set[int] = set()  # no name has them any more, requests may
        self._lock = asyncio.Lock()

    async def load(self, request: LoRARequest, ask: AskEngines) -> None:
        """Have an adapter loaded between two steps of every engine, unless it is.

        Args:
            request: Names it.
            ask: Asks the engines.

        Raises:
            InvalidRequestError: It cannot be served; the message says why.
            EngineDeadError: An engine has died.
        """
        if self.registry.find(request) is not None:
            return
        async with self._lock:
            await self._drop_retired(ask)
            if self.registry.find(request) is not None:  # loaded while this one waited
                return
            folder = await asyncio.to_thread(self.registry.check, request)
            crowded_out = self.registry.crowded_out(self._in_use())
            if crowded_out is not None:
                self.registry.forget(crowded_out)
                self._retired.add(crowded_out.number)
                await self._drop_retired(ask)
            number = self.registry.new_number()
            try:
                await ask(queries.ADD, queries.add_payload(number, request.lora_name, folder), queries.LOAD_SECONDS)
            except QueryError as error:
                self._retired.add(number)  # one of several engines may have it
                raise InvalidRequestError(str(error), "lora_request") from error
            before = self.registry.put(replace(request, lora_path=folder, load_inplace=False), number)
            if before is not None and not before.is_from_start:
                self._retired.add(before.number)

    async def remove(self, lora_id: int, ask: AskEngines) -> bool:
        """Forget an adapter; one that was named at the start stays in memory, since other front ends may serve it."""
        taken = self.registry.take_out(lora_id)
        if taken is None:
            return False
        if not taken.is_from_start:
            self._retired.add(taken.number)
            async with self._lock:
                await self._drop_retired(ask)
        return True

    def number_of(self, request: LoRARequest) -> int:
        """The number of a loaded adapter.

        Raises:
            InvalidRequestError: It is not loaded any more.
        """
        found = self.registry.find(replace(request, load_inplace=False))
        if found is None:
            raise InvalidRequestError(
                f"the adapter {request.lora_name!r} was removed while the request came in", "lora_request"
            )
        return found.number

    async def _drop_retired(self, ask: AskEngines) -> None:
        """Have the engines forget adapters without a name that no request needs."""
        for number in self._retired - self._in_use():
            self._retired.discard(number)
            await ask(queries.REMOVE, queries.remove_payload(number), queries.LOAD_SECONDS)


class AdapterMethods:
    """vLLM's methods on adapters, for a class with :class:`AsyncAdapters`."""

    _adapters: AsyncAdapters

    async def _ask_engines(self, kind: str, payload: bytes, seconds: float) -> None:
        """Ask every engine, and wait for all answers; the class that has adapters says how."""
        raise NotImplementedError

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter between two steps of every engine; requests name it by the same ``LoRARequest``.

        Returns:
            True; one that is loaded stays as it is, unless ``load_inplace`` asks for its folder to be read again.

        Raises:
            InvalidRequestError: It cannot be served; the message says why.
            EngineDeadError: An engine has died.
        """
        await self._adapters.load(lora_request, self._ask_engines)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapter of this ``lora_int_id``; requests under way keep it to their end. False: there is none."""
        return await self._adapters.remove(lora_id, self._ask_engines)

    async def list_loras(self) -> set[int]:
        """The ``lora_int_id`` of every adapter that is loaded."""
        return {request.lora_int_id for request in self._adapters.registry.requests()}
