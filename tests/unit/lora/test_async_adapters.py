"""Front ends that share an engine's list of adapters: what each asks for, and that none misses a change of another."""

import asyncio
import json
from array import array

import pytest

from rustvllm.exceptions import QueryError
from rustvllm.lora import queries
from rustvllm.lora.async_adapters import AsyncAdapters
from rustvllm.lora.registry import AdapterRegistry
from rustvllm.lora.request import LoRARequest


class Engine:
    """Keeps a list as ``EngineAdapters`` does; ``before_answer`` is called once an adapter is on it, unknown to all."""

    def __init__(self):
        self.rows, self.num_changes, self.asked = {}, 0, []
        self.before_answer = self.before_load = None

    async def ask(self, kind, payload, seconds, *, rank=None):
        self.asked.append(kind)
        wanted = json.loads(payload or b"{}")
        if kind == queries.LIST:
            return json.dumps({"adapters": list(self.rows.values()), "num_changes": self.num_changes}).encode()
        if kind == queries.ADD:
            if self.before_load is not None:
                before, self.before_load = self.before_load, None
                await before()
            row = wanted["row"]
            is_in_place = row.pop("load_inplace")
            if row["name"] in self.rows and not is_in_place:
                raise QueryError(queries.already_loaded(row["name"]))
            replaced = self.rows.get(row["name"], {"number": None})["number"]
            self.rows[row["name"]], self.num_changes = row, self.num_changes + 1
            answer = {"replaced": replaced, "num_changes": self.num_changes}
            if self.before_answer is not None:
                before, self.before_answer = self.before_answer, None
                await before()
            return json.dumps(answer).encode()
        if kind == queries.WITHDRAW:
            self.num_changes += 1
            return json.dumps(self.rows.pop(wanted["name"], {"number": None})["number"]).encode()
        assert kind == queries.RETIRE
        return b"true"


@pytest.fixture
def fronts(monkeypatch):
    """Two front ends of one server, and their engine."""
    monkeypatch.setattr(AdapterRegistry, "check", lambda _, request: request.lora_path)
    versions = memoryview(array("q", [0] * 4))
    made = []
    for own in (1, 2):
        adapters = AsyncAdapters(FakeConfig, set)
        adapters.versions, adapters.own_version = versions, own
        made.append(adapters)
    return (*made, Engine())


class FakeConfig:
    class lora:  # noqa: N801 -- an attribute's name
        modules, max_cpu_loras = (), None

    class model:  # noqa: N801
        served_model_name = ("base",)

    class load:  # noqa: N801
        download_dir = None

    class parallel:  # noqa: N801
        data_parallel_size = 1


def names(adapters):
    return sorted(adapters.registry.by_name)


def test_a_load_asks_once_and_its_own_change_is_known(fronts):
    one, other, engine = fronts

    async def run():
        await one.refresh(engine.ask)
        engine.asked.clear()
        for number, name in enumerate("abc", 1):
            await one.load(LoRARequest(name, number, f"/{name}"), engine.ask)
            await one.refresh(engine.ask)
        assert engine.asked == [queries.ADD] * 3
        await one.load(LoRARequest("a", 1, "/a", load_inplace=True), engine.ask)
        await one.refresh(engine.ask)
        assert engine.asked == [queries.ADD] * 4, "what had the name is retired by the engine"
        assert names(one) == ["a", "b", "c"]
        assert one.number_of(LoRARequest("a", 1, "/a")) == engine.rows["a"]["number"]
        engine.asked.clear()
        await other.refresh(engine.ask)
        await other.refresh(engine.ask)
        assert (names(other), engine.asked) == (["a", "b", "c"], [queries.LIST])

    asyncio.run(run())


@pytest.mark.parametrize("moment", ["before_load", "before_answer"])
def test_another_front_ends_change_is_seen_whenever_it_comes(fronts, moment):
    one, other, engine = fronts

    async def run():
        for each in (one, other):
            await each.refresh(engine.ask)

        async def meanwhile():
            await other.load(LoRARequest("theirs", 8, "/theirs"), engine.ask)

        setattr(engine, moment, meanwhile)
        await one.load(LoRARequest("ours", 7, "/ours"), engine.ask)
        for each in (one, other):
            await each.refresh(engine.ask)
            assert names(each) == ["ours", "theirs"]
        engine.asked.clear()
        assert await other.remove(7, engine.ask)
        await one.refresh(engine.ask)
        assert names(one) == ["theirs"]

    asyncio.run(run())


def test_a_name_that_another_took_meanwhile_is_an_error_and_the_weights_go(fronts):
    one, other, engine = fronts

    async def run():
        for each in (one, other):
            await each.refresh(engine.ask)

        async def meanwhile():
            await other.load(LoRARequest("same", 8, "/theirs"), engine.ask)

        engine.before_load = meanwhile
        with pytest.raises(Exception, match="has already been loaded"):
            await one.load(LoRARequest("same", 8, "/theirs"), engine.ask)
        assert engine.asked[-1] == queries.RETIRE
        await one.refresh(engine.ask)
        assert one.number_of(LoRARequest("same", 8, "/theirs")) == engine.rows["same"]["number"]

    asyncio.run(run())
