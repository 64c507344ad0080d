"""Streams of ``AsyncLLM`` whose events go straight to a sink, and what a sink that refuses them gets."""

import asyncio
import json

import pytest

from async_streams import LONG, collect, is_idle, until
from rustvllm import _core
from rustvllm.exceptions import RequestFailedError
from rustvllm.sampling_params import RequestOutputKind


@pytest.fixture
def make(make_async):
    return make_async


class Sink:
    """Takes events until it is stopped."""

    def __init__(self, n=1):
        self.templates = [(b"%d<" % index, b">\n") for index in range(n)]
        self.events = []
        self.takes = True
        self.turn_reading = self.response_events = None
        self.calls = {}

    def write(self, event):
        self.events.append(event)
        return self.takes

    def note_calls(self, sample, num_calls):
        self.calls[sample] = num_calls

    def text(self, index=0):
        start = b"%d<" % index
        events = b"".join(self.events).splitlines()
        return "".join(json.loads(event[len(start) : -1]) for event in events if event.startswith(start))


async def test_a_sink_gets_the_text_and_the_outputs_the_end(make):
    engine, sink = make(), Sink()
    stream = await engine.add_request("r", "a", LONG, sink=sink)
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    last = outputs[0].outputs[0]
    whole = await collect(engine, "a", LONG.clone(output_kind=RequestOutputKind.FINAL_ONLY), "whole")
    assert sink.text() + last.text == whole[0].outputs[0].text
    assert last.token_ids == whole[0].outputs[0].token_ids
    assert (last.finish_reason, outputs[0].finished) == ("length", True)
    metrics = outputs[0].metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


async def test_each_sample_has_its_own_events(make):
    engine, sink = make(), Sink(n=3)
    params = LONG.clone(n=3, temperature=1, seed=5)
    stream = await engine.add_request("r", "a", params, sink=sink)
    ends = {completion.index: completion async for output in stream for completion in output.outputs}
    whole = await collect(engine, "a", params.clone(output_kind=RequestOutputKind.FINAL_ONLY), "whole")
    texts = [sink.text(index) + ends[index].text for index in range(3)]
    assert texts == [completion.text for completion in whole[0].outputs]


async def test_a_sink_that_reads_gets_all_of_the_text_as_deltas(make):
    engine, sink = make(), Sink()
    sink.turn_reading = _core.TurnReading(None, "deepseek_r1", begins_within=True)
    stream = await engine.add_request("r", "a", LONG, sink=sink)
    [output] = [output async for output in stream]
    whole = await collect(engine, "a", LONG.clone(output_kind=RequestOutputKind.FINAL_ONLY), "whole")
    assert (output.outputs[0].text, sink.calls) == ("", {})
    assert output.outputs[0].token_ids == whole[0].outputs[0].token_ids
    events = [event.removeprefix(b'0<,"delta":').removesuffix(b">\n") for event in sink.events if event]
    deltas = [json.loads(event) for line in events for event in line.split(b'>\n0<,"delta":')]
    text = whole[0].outputs[0].text
    assert text
    for field in ("reasoning", "reasoning_content"):
        assert "".join(delta[field] for delta in deltas) == text.strip("\n")


async def test_a_sink_that_refuses_gets_the_rest_merged(make, toy_executors):
    engine, sink = make(), Sink()
    sink.takes = False
    stream = await engine.add_request("r", "a", LONG, sink=sink)
    other = await collect(engine, "b", LONG, "other")
    assert sum(len(output.outputs[0].token_ids) for output in other) == 60, "other requests do not wait"
    await until(lambda: len(toy_executors[0].steps) >= 60)
    await asyncio.sleep(0.05)
    assert len(sink.events) == 1
    assert engine.stats()["num_running"] == 0
    sink.takes = True
    stream.resume()
    outputs = [output async for output in stream]
    assert len(sink.events) == 2, "the rest came at once"
    assert sink.events[1].count(b"0<") <= 32, "and merged"
    assert len(outputs[0].outputs[0].token_ids) == 60
    whole = await collect(engine, "a", LONG.clone(output_kind=RequestOutputKind.FINAL_ONLY), "whole")
    assert sink.text() + outputs[0].outputs[0].text == whole[0].outputs[0].text


async def test_closing_a_stream_with_a_sink_aborts(make, toy_executors):
    engine, sink = make(), Sink()
    toy_executors[0].gate.clear()
    stream = await engine.add_request("r", "a", LONG, sink=sink)
    stream.close()
    toy_executors[0].gate.set()
    await until(lambda: is_idle(engine))
    stream.resume()
    assert len(sink.events) <= 1


@pytest.mark.parametrize("interval", [1, 7, 100])
async def test_events_hold_as_many_tokens_as_their_interval(make, interval):
    engine, sink = make(), Sink()
    stream = await engine.add_request("r", "a", LONG.clone(stream_interval=interval), sink=sink)
    [output] = [output async for output in stream]
    texts = [json.loads(event[2:-1]) for event in b"".join(sink.events).splitlines()]
    whole = await collect(engine, "a", LONG.clone(output_kind=RequestOutputKind.FINAL_ONLY), "whole")
    assert "".join(texts) + output.outputs[0].text == whole[0].outputs[0].text
    assert output.outputs[0].token_ids == whole[0].outputs[0].token_ids
    assert texts[0] == "b"
    assert len(texts) <= 1 + 59 // interval
    if interval == 7:
        assert all(len(text) >= 7 for text in texts[1:4]), "the first of them are a character each"


async def test_text_in_front_of_an_error_is_an_event(make, toy_executors):
    engine, sink = make(), Sink()

    def on_step(count):
        if count == 20:
            raise RuntimeError("boom")

    toy_executors[0].on_step = on_step
    stream = await engine.add_request("r", "a", LONG.clone(stream_interval=100), sink=sink)
    with pytest.raises(RequestFailedError, match="boom"):
        await anext(stream)
    assert sink.text() == "".join(map(chr, range(98, 98 + 19)))
