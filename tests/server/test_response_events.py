"""The events of responses that the core renders are, byte by byte, those that Python makes of the same answers.

Answers go token by token through the scheduler and two output processors. One renders events, and is read at random
times; the other gives what :class:`NaiveResponseEvents` renders. Each has ids of its own; here they are numbers.
"""

import json
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from naive_response_events import NaiveResponseEvents, naive_custom_input
from response_stream import WEATHER, saying

from rustvllm import _core
from rustvllm.exceptions import RequestFailedError
from rustvllm.outputs import CompletionOutput, RequestOutput
from rustvllm.sampling_params import SamplingParams
from rustvllm.server.answers.response_items import ItemReader
from rustvllm.server.answers.response_object import Echo, ResponseFrame
from rustvllm.server.answers.turn import TurnReaders, TurnReading
from rustvllm.server.answers.usage import UsageCounter
from rustvllm.server.schemas.protocol import ChatCompletionRequest
from rustvllm.server.schemas.responses_request import ResponsesRequest
from rustvllm.server.stream.chunks import PromptEvents
from rustvllm.server.stream.response_events import ResponseEventRenderer
from rustvllm.text.turn_formats import TurnFormats

CUSTOM = frozenset({"patch"})
PARTS = [
    "Hello", " world. ", "\n\n", '\t"quoted" \\ and \x00\x1f\x7f', "\u2028</script>", "é漢😀", "👨‍👩‍👧‍👦", "e\u0301",
    "<", "</", "<tool", "STOP", "<think>", "</think>", '<think>\nHm, "é"?\n</think>\n\n', "<tool_call>", "</tool_call>",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa\\"ris 漢"}}\n</tool_call>',
    '<tool_call>\n{"name": "patch", "arguments": {"input": "\\"b\\"\\n \\ud83d\\ude00 \\ud83d"}}\n</tool_call>\n',
    '<tool_call>\n{"name": "patch", "arguments": {}}\n</tool_call>',
    '<tool_call>{"name": "other", "arguments": {"a": [1, {}]}}</tool_call>',
]  # fmt: skip
MARKS = ["<think>", "</think>", "<eos>"]
"""Tokens of their own."""
ID = re.compile(rb"\b(?:msg|rs|fc|ctc|call)_[0-9a-zA-Z]{24,32}\b")
ASKED = ResponsesRequest(input="Hi", instructions="“Be kind.”", metadata={"a": "b"})
HEADER = {"id": "resp_1", "created": 5, "model": "m"}


def spelled():
    """GPT-2's character for each byte."""
    printable = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = [byte for byte in range(256) if byte not in printable]
    return printable | {byte: chr(256 + place) for place, byte in enumerate(others)}


@pytest.fixture(scope="module")
def vocabulary():
    """Ids of the tokens: each byte, and what few bytes in a row of the parts are, cut within characters, too."""
    cuts = {bytes([byte]) for byte in range(256)}
    for part in map(str.encode, PARTS):
        cuts |= {part[start : start + size] for start in range(len(part)) for size in (2, 3, 5)}
    return {token: index for index, token in enumerate([*(mark.encode() for mark in MARKS), *sorted(cuts)])}


@pytest.fixture(scope="module")
def tokenizer(vocabulary, tmp_path_factory):
    alphabet = spelled()
    marks = {mark: index for index, mark in enumerate(MARKS)}
    cuts = {"".join(alphabet[byte] for byte in token): index for token, index in vocabulary.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": index, "content": mark, "special": mark == "<eos>", **flags} for mark, index in marks.items()]
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {**cuts, **marks}, "merges": [], "byte_fallback": False}
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")
    rest = {"version": "1.0", **dict.fromkeys(names), "decoder": decoder}
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(json.dumps({**rest, "added_tokens": added, "model": model}))
    return _core.Tokenizer.from_file(str(file))


def token_ids_of(text, vocabulary, rng):
    """A text as tokens, cut anywhere."""
    whole, ids, at = text.encode(), [], 0
    marks = [mark.encode() for mark in MARKS]
    while at < len(whole):
        sizes = [len(mark) for mark in marks if whole.startswith(mark, at)]
        size = sizes[0] if sizes else rng.choice([1, 1, 2, 3, 5])
        if whole[at : at + size] not in vocabulary:
            size = 1
        ids.append(vocabulary[whole[at : at + size]])
        at += size
    return ids


class Answer:
    """What two renderers need of one request."""

    def __init__(self, rng, *, is_read, logprobs=None):
        formats = TurnFormats("hermes", "qwen3", marker_ids={"<think>": 0, "</think>": 1}, reasoning_ids=(0, 1))
        self.reading = TurnReading(
            formats=formats,
            tools=_core.Tools([("weather", "{}", False), ("patch", "{}", False)]),
            is_parallel=rng.random() < 0.7,
            begins_within=rng.random() < 0.3,
            reasoning_fields=() if rng.random() < 0.2 else ("reasoning",),
        )
        self.is_read, self.logprobs = is_read, logprobs
        self.frame = ResponseFrame(HEADER, Echo(ASKED, SamplingParams()))

    def _usage_and_reader(self):
        usage = UsageCounter(show_cached=True)
        readers = TurnReaders(self.reading)
        usage.count_reasoning = lambda: readers.num_reasoning_tokens
        return usage, readers[0] if self.is_read else None

    def renderer(self):
        usage, reader = self._usage_and_reader()
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], stream=True)
        renderer = ResponseEventRenderer(HEADER, b"", b"", b"", request, usage, self.logprobs)
        renderer.show(self.frame, reader, CUSTOM)
        return renderer, usage

    def naive(self):
        usage, reader = self._usage_and_reader()
        return NaiveResponseEvents(self.frame, ItemReader(reader, CUSTOM, self.logprobs), usage), usage


class Streams:
    """Two requests that get the same tokens: one is rendered in the core, one is not."""

    def __init__(self, tokenizer, answer, **params):
        self.processor, self.naive_processor = _core.OutputProcessor(tokenizer), _core.OutputProcessor(tokenizer)
        self.renderer, self.usage = answer.renderer()
        self.naive, self.naive_usage = answer.naive()
        self.written, self.busy, self.is_read = [], False, answer.is_read
        writer = SimpleNamespace(write=self._write)
        self.sink = PromptEvents(writer, self.renderer, 0, 1)
        self.sink.open_with(self.renderer.opening)
        self.has_ended = self.has_begun = False
        self.num_core_events = 0
        handles = []
        for processor, more in (
            (self.processor, {"response_events": self.sink.response_events}),
            (self.naive_processor, {}),
        ):
            scheduler = _core.Scheduler(_core.SchedulerConfig(num_blocks=512, max_model_len=4096))
            key = scheduler.handle.new_key()
            of_text = {name: params[name] for name in ("stop", "stream_interval") if name in params}
            processor.add_request(key, [5], skip_special_tokens=False, **of_text, **more)
            scheduler.handle.add_request(
                key, "r", [5], max_tokens=params["max_tokens"], eos_token_id=2, has_stop_strings="stop" in params
            )
            handles.append((scheduler, key))
        (self.scheduler, self.key), (self.naive_scheduler, self.naive_key) = handles

    def _write(self, events):
        self.written.append(events)
        return not self.busy

    def step(self, token_id):
        """A token for both; whether there may be another."""
        for scheduler in (self.scheduler, self.naive_scheduler):
            step = scheduler.schedule()
            if step is None:
                return False
            scheduler.update_from_output(step, np.array([[token_id]], np.int32))
        self._read_naive()
        return True

    def abort(self):
        self.scheduler.handle.abort_requests(["r"])
        self.naive_scheduler.handle.abort_requests(["r"])
        assert self.scheduler.schedule() is None
        assert self.naive_scheduler.schedule() is None
        self._read_naive()

    def _read_naive(self):
        _, deltas = self.naive_processor.poll(self.naive_scheduler.handle)
        for delta in deltas:
            completion = self._counted(delta, self.naive_usage)
            if not self.has_begun and (delta.new_text or delta.finish_reason):
                self.has_begun = True
                self.naive.begin()
            if delta.finish_reason:
                self.naive.finish(completion)
            elif delta.new_text or self.is_read:  # a message begins with its text
                self.naive.text(completion)

    def read(self):
        """Take what the core has."""
        events, deltas = self.processor.poll(self.scheduler.handle)
        for _, event in events:
            self.num_core_events += event.count(b"\n\n")
            if not self.sink.write(event):
                self.processor.hold([self.key])
        for delta in deltas:
            assert not self.has_ended
            assert delta.finish_reason
            self.has_ended = True
            completion = self._counted(delta, self.usage)
            assert completion.text == "", "the core has read it"
            self.written.append(self.sink.opening())
            self.written.append(
                self.renderer.finish(0, completion.text, completion.finish_reason, completion.stop_reason, completion)
            )
            self.written += self.renderer.closing()

    def fail(self):
        """An error ends both."""
        self.read()
        error = RequestFailedError("the step failed: “why”")
        self.written.append(self.renderer.error(error))
        self.naive.error(error)

    def resume(self):
        self.busy = False
        self.processor.release([self.key])

    @staticmethod
    def _counted(delta, usage):
        completion = CompletionOutput(
            index=0, text=delta.new_text, token_ids=delta.new_token_ids, finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )  # fmt: skip
        usage.add(0, RequestOutput("r", None, [5], [completion], finished=bool(delta.finish_reason)))
        return completion

    def both(self):
        return plain(b"".join(self.written)), plain(b"".join(self.naive.events))


def plain(events):
    """Events one by one, with numbers in place of ids and no time."""
    seen = {}
    numbered = ID.sub(lambda found: seen.setdefault(found[0], b"id%d" % len(seen)), events)
    return re.sub(rb'"completed_at":\d+', b'"completed_at":0', numbered).split(b"\n\n")


def joined_deltas(events):
    """Events with deltas of the same item joined, and their numbers left out."""
    joined = []
    for event in events[:-1]:
        data = json.loads(event.split(b"\ndata: ")[1])
        data.pop("sequence_number")
        if "delta" in data and joined and joined[-1]["type"] == data["type"]:
            joined[-1]["delta"] += data["delta"]
        else:
            joined.append(data)
    return joined


def run(tokenizer, vocabulary, rng, *, end, is_read=True, pauses=(1,), **params):
    """One answer to its end, both ways."""
    text = "".join(rng.choice(PARTS) for _ in range(rng.randrange(12)))
    ids = token_ids_of(text[: rng.randrange(len(text) + 1)] if rng.random() < 0.5 else text, vocabulary, rng)
    limit = rng.randrange(1, len(ids) + 2)
    most = {"length": limit, "stop": 4000}.get(end, len(ids) + 4)
    streams = Streams(tokenizer, Answer(rng, is_read=is_read), max_tokens=most, **params)
    due = rng.choice(pauses)
    for token_id in [*ids, *([2] if end in ("stop", "length") else [])]:
        if not streams.step(token_id):
            break
        due -= 1
        if due <= 0:
            streams.read()
            due = rng.choice(pauses)
    if end == "abort":
        streams.abort()
    elif end == "error":
        streams.fail()
        return streams
    elif end == "length":
        while streams.step(vocabulary[b"a"]):
            pass
    streams.read()
    assert streams.has_ended
    return streams


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "text"])
@pytest.mark.parametrize("end", ["stop", "length", "abort", "error", "stop string"])
def test_the_events_of_the_core_are_those_of_python(tokenizer, vocabulary, end, is_read):
    rng = random.Random(f"{end} {is_read}")
    params = {"stop": ["STOP", " wor", "</think>\n\n<"]} if end == "stop string" else {}
    num_in_core, kinds = 0, set()
    for _ in range(50):
        real_end = "stop" if end == "stop string" else end
        streams = run(tokenizer, vocabulary, rng, end=real_end, is_read=is_read, pauses=(1, 2, 3, 7, 20), **params)
        ours, naive = streams.both()
        for number, (event, expected) in enumerate(zip(ours, naive, strict=True)):
            assert event == expected, number
        num_in_core += streams.num_core_events
        kinds |= set(re.findall(rb"event: (\S+)", b"\n".join(ours)))
    assert num_in_core > 300, "the core has made most of them"
    wanted = {b"response.output_text.delta"}
    if is_read:
        wanted |= {b"response.reasoning_text.delta", b"response.function_call_arguments.delta"}
        wanted |= {b"response.custom_tool_call_input.delta"}
    last = {"stop": b"completed", "length": b"incomplete", "stop string": b"completed"}.get(end, b"failed")
    assert {*wanted, b"response." + last} <= kinds


@pytest.mark.parametrize("interval", [1, 5])
def test_a_reader_that_is_busy_gets_the_same_in_fewer_events(tokenizer, vocabulary, interval):
    rng = random.Random(interval)
    num_ours = num_naive = 0
    for _ in range(40):
        text = "".join(rng.choice(PARTS) for _ in range(20))
        ids = token_ids_of(text, vocabulary, rng)
        streams = Streams(tokenizer, Answer(rng, is_read=True), max_tokens=len(ids), stream_interval=interval)
        for number, token_id in enumerate(ids):
            streams.busy = number > 3
            assert streams.step(token_id)
            streams.read()
        streams.resume()
        streams.read()
        assert streams.has_ended
        ours, naive = streams.both()
        assert [json.loads(event.split(b"data: ")[1])["sequence_number"] for event in ours[:-1]] == [
            *range(len(ours) - 1)
        ]
        assert joined_deltas(ours) == joined_deltas(naive)
        num_ours, num_naive = num_ours + len(ours), num_naive + len(naive)
    assert num_ours < num_naive


def test_log_probabilities_go_with_their_text(vocabulary):
    def logprobs(completion):
        shown = [
            {"token": str(token_id), "logprob": -0.5, "bytes": [1], "top_logprobs": []}
            for token_id in completion.token_ids
        ]
        return {"content": shown}

    rng = random.Random(3)
    num_shown = 0
    for number in range(60):
        answer = Answer(rng, is_read=number % 3 > 0, logprobs=logprobs)
        text = "".join(rng.choice([part for part in PARTS if part.isascii()]) for _ in range(8))
        ids = token_ids_of(text, vocabulary, rng)
        names = {index: token.decode() for token, index in vocabulary.items() if token.isascii()}
        (ours, usage), (naive, naive_usage) = answer.renderer(), answer.naive()
        assert not ours.is_core_rendered
        written = [ours.opening()]
        naive.begin()
        at, offset = 0, 0
        while at < len(ids):
            some = ids[at : at + rng.choice([1, 1, 2, 9])]
            at += len(some)
            words = [names[token_id] for token_id in some]
            offsets = [offset + len("".join(words[:index])) for index in range(len(words))]
            offset += len("".join(words))
            reason = "length" if at >= len(ids) else None
            completion = CompletionOutput(index=0, text="".join(words), token_ids=some, finish_reason=reason)
            completion.text_offsets = offsets
            for counter in (usage, naive_usage):
                counter.add(0, RequestOutput("r", None, [5], [completion], finished=bool(reason)))
            if reason:
                written += [ours.finish(0, completion.text, reason, None, completion), *ours.closing()]
                naive.finish(completion)
            else:
                written.append(ours.text(0, completion.text, completion))
                naive.text(completion)
        shown = b"".join(written)
        num_shown += shown.count(b'"top_logprobs"')
        assert plain(shown) == plain(b"".join(naive.events))
    assert num_shown > 500


def test_an_error_before_the_response_has_begun_is_an_event_of_its_own():
    renderer, _ = Answer(random.Random(1), is_read=True).renderer()
    naive, _ = Answer(random.Random(1), is_read=True).naive()
    naive.error(RequestFailedError("no"))
    assert renderer.error(RequestFailedError("no")) == b"".join(naive.events)
    assert b'"sequence_number":0' in naive.events[0]


def test_an_answer_that_was_let_go_of_has_a_beginning_and_an_end():
    renderer, _ = Answer(random.Random(1), is_read=True).renderer()
    events = plain(b"".join([renderer.finish(0, "", "abort", None), *renderer.closing()]))
    kinds = [event.split(b"\n")[0].removeprefix(b"event: response.") for event in events[:-1]]
    assert kinds[:3] == [b"created", b"in_progress", b"output_item.added"]
    assert kinds[-1] == b"failed"


def test_the_end_of_a_long_answer_comes_in_pieces():
    renderer, _ = Answer(random.Random(1), is_read=False).renderer()
    renderer.opening()
    text = "漢\n" * 400_000
    renderer.text(0, text, CompletionOutput(index=0, text=text, token_ids=[7], finish_reason=None))
    renderer.finish(0, "", "stop", None, CompletionOutput(index=0, text="", token_ids=[2], finish_reason="stop"))
    pieces = list(renderer.closing())
    assert max(map(len, pieces)) <= 2 * (256 << 10)
    events = b"".join(pieces).split(b"\n\n")
    assert [json.loads(event.split(b"data: ")[1])["type"].removeprefix("response.") for event in events[:-1]] == [
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    last = json.loads(events[-2].split(b"data: ")[1])
    assert last["response"]["output"][0]["content"][0]["text"] == text


async def test_the_core_makes_the_events_unless_they_hold_more():
    body = {"input": "Hi", "stream": True, "max_output_tokens": 9}
    large = {"metadata": {str(number): "x" * 500 for number in range(16)}, "instructions": "x" * 140_000}
    asked = [{}, {"tools": [WEATHER]}, large]
    async with saying("Yes.", "{{ messages[0].role }}") as (client, engine):
        for more in asked:
            assert (await client.post("/v1/responses", json=body | more)).status_code == 200
    first, second, third = engine.sinks
    assert third is None
    assert isinstance(first.response_events, _core.ResponseEvents)
    assert isinstance(second.response_events, _core.ResponseEvents)


INPUTS = st.text(
    st.one_of(st.sampled_from('{}[]",:\\ \n\tinputd83e01fNa-'), st.characters(exclude_categories=["Cs"])), max_size=40
)


@given(INPUTS, st.integers(0, 200), st.booleans())
@example('{"input": "\\ud83d\\ude00 \\ud83d \\ude00 \\\\ud83d"}', 200, False)
@example('{"input": "a\\', 200, False)
@example('{"input": "a\nb"}', 200, False)
@example('{"input": "a", "input": 1}', 200, False)
@example('{"input": 1}', 200, False)
@example('["input"]', 200, False)
@example("", 0, False)
def test_the_input_of_a_custom_tool_is_what_pythons_json_finds(text, size, is_whole):
    arguments = json.dumps({"input": text}, ensure_ascii=len(text) % 2 == 0) if is_whole else text
    arguments = arguments[:size]
    if "NaN" not in arguments and "Infinity" not in arguments:  # JSON has neither
        assert _core.custom_input(arguments) == naive_custom_input(arguments)


@given(INPUTS, st.integers(0, 60))
def test_the_input_of_a_custom_tool_that_is_cut_is_what_pythons_json_finds(text, size):
    arguments = f'{{"input": "{text}"}}'[:size]
    if "NaN" not in arguments and "Infinity" not in arguments:
        assert _core.custom_input(arguments) == naive_custom_input(arguments)
