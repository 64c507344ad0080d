"""Batch files over a fake engine: every line gets its answer, in order, whatever the others are; nothing is lost."""

import asyncio
import io
import json
from pathlib import Path

import pytest
from fake_engine import FakeEngine, expected_text

from rustvllm.batch.journal import BatchJournal
from rustvllm.batch.lines import count_lines, read_lines
from rustvllm.batch.runner import BatchRunner, window
from rustvllm.exceptions import ConfigError, EngineDeadError, QueueFullError
from rustvllm.server.state import ServerState

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_LINE_BYTES = 1000


def line_of(custom_id, body, url=COMPLETIONS, **others):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **others})


def lines_of(text, model="fake"):
    content = text if isinstance(text, bytes) else text.encode()
    return list(read_lines(io.BytesIO(content), model, MAX_LINE_BYTES))


async def answers_of(text, path, engine=None, *, resume=False):
    """The output of a batch, as objects."""
    state = ServerState()
    state.set_ready(engine or FakeEngine())
    with BatchJournal(path, resume=resume) as journal:
        runner = BatchRunner(state, journal)
        journal.finish(await runner.run(lines_of(text)))
    assert [each.name for each in path.parent.iterdir()] == [path.name], "the journal and nothing else has gone"
    return [json.loads(line) for line in path.read_text().splitlines()], runner.counts


async def test_every_line_is_answered_in_the_order_of_the_input(tmp_path):
    text = "\n".join(
        line_of(f"c{i}", {"prompt": "abc", "max_tokens": 40 - i, "n": 1 + i % 2})
        if i % 3
        else line_of(f"c{i}", {"messages": [{"role": "user", "content": "abcd"}], "max_tokens": 3}, CHAT)
        for i in range(40)
    )
    answers, counts = await answers_of(text, tmp_path / "out.jsonl")
    assert [answer["custom_id"] for answer in answers] == [f"c{i}" for i in range(40)]
    for i, answer in enumerate(answers):
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        body = answer["response"]["body"]
        if i % 3:
            assert [choice["text"] for choice in body["choices"]] == [
                expected_text(4, 40 - i, sample) for sample in range(1 + i % 2)
            ]
        else:
            assert body["choices"][0]["message"]["content"] == expected_text(5, 3)
    assert len({answer["id"] for answer in answers}) == len({answer["response"]["request_id"] for answer in answers})
    assert (counts.answered, counts.failed, counts.earlier) == (40, 0, 0)
    assert counts.completion_tokens == sum((1 + i % 2) * (40 - i) if i % 3 else 3 for i in range(40))
    assert counts.prompt_tokens == sum(answer["response"]["body"]["usage"]["prompt_tokens"] for answer in answers) > 0


@pytest.mark.parametrize(
    ("line", "custom_id", "param", "says"),
    [
        ("garbage", None, None, "not valid JSON"),
        ("[1]", None, None, "JSON object"),
        ("[" * 900, None, None, "not valid JSON"),
        ('{"custom_id": NaN}', None, None, "not valid JSON"),
        (b'{"custom_id": "\xff"}', None, None, "not valid JSON"),
        ('{"custom_id": "\\ud800"}', None, None, "not valid JSON"),
        ("{}", None, "custom_id", "custom_id must be"),
        (line_of(7, {}), None, "custom_id", "custom_id must be"),
        (line_of("", {}), None, "custom_id", "custom_id must be"),
        (line_of("x" * 513, {}), None, "custom_id", "512"),
        (line_of("first", {"prompt": "a"}), "first", "custom_id", "also on line 1"),
        (line_of("a", {"prompt": "a"}, method="GET"), "a", "method", "'GET'"),
        (line_of("a", {"input": "a"}, "/v1/embeddings"), "a", "model", "--runner pooling"),
        (line_of("a", {"prompt": "a"}, "/pooling"), "a", "url", "'/pooling'"),
        (line_of("a", {"text_1": "a", "text_2": "b"}, "/v1/score"), "a", "model", "--runner pooling"),
        (line_of("a", {"prompt": "a"}, ["x"]), "a", "url", "/v1/completions"),
        (line_of("a", None), "a", "body", "object"),
        (line_of("a", [1]), "a", "body", "object"),
        (line_of("a", {"prompt": "a", "stream": True}), "a", "stream", "cannot stream"),
        (line_of("a", {"prompt": "x" * 2000}), None, None, "1000 are taken"),
        (line_of("a", {"prompt": "x", "temperature": 9}), "a", "temperature", "got 9"),
        (line_of("a", {"prompt": "x", "model": "other"}), "a", "model", "`other` does not exist"),
        (line_of("a", {"prompt": "x" * 500}), "a", "input_tokens", "256 tokens"),
        (line_of("a", {}), "a", "prompt", "required"),
    ],
)
async def test_a_wrong_line_is_an_answer_and_harms_no_other(tmp_path, line, custom_id, param, says):
    content = line if isinstance(line, bytes) else line.encode()
    good = [line_of(name, {"prompt": "abc", "max_tokens": 2}).encode() for name in ("first", "last")]
    answers, counts = await answers_of(b"\n".join([good[0], content, good[1]]), tmp_path / "out.jsonl")
    assert [answer["response"]["status_code"] for answer in answers][::2] == [200, 200]
    wrong = answers[1]
    assert wrong["custom_id"] == custom_id
    assert wrong["response"]["status_code"] == wrong["error"]["code"] in (400, 404)
    assert wrong["response"]["body"] == {"error": wrong["error"]}
    assert wrong["error"]["param"] == param
    assert says in wrong["error"]["message"]
    assert len(json.dumps(wrong)) < 2000
    assert (counts.answered, counts.failed) == (2, 1)


def test_lines_are_counted_and_read_with_any_line_end():
    good = line_of("a", {"prompt": "a"}), line_of("b", {"prompt": "b"})
    for content in (
        f"{good[0]}\n{good[1]}",
        f"{good[0]}\r\n{good[1]}\r\n",
        f"\ufeff{good[0]}\n\n  \n{good[1]}\n\n",
    ):
        assert [line.custom_id for line in lines_of(content)] == ["a", "b"]
        assert count_lines(io.BytesIO(content.encode())) == 2
    for content in ("", "\n", " \n\r\n"):
        assert lines_of(content) == []
        assert count_lines(io.BytesIO(content.encode())) == 0


def test_the_id_of_an_answer_is_that_of_the_line_and_the_model():
    one = lines_of(line_of("a", {"prompt": "a"}))[0].answer_id
    assert one == lines_of(line_of("a", {"prompt": "a"}))[0].answer_id
    assert one != lines_of(line_of("a", {"prompt": "b"}))[0].answer_id
    assert one != lines_of(line_of("a", {"prompt": "a"}), "other")[0].answer_id


async def test_a_dead_engine_ends_the_batch_and_a_second_run_goes_on(tmp_path):
    path = tmp_path / "out.jsonl"
    text = "\n".join(line_of(f"c{i}", {"prompt": "abc", "max_tokens": 1 + i}) for i in range(20))
    engine = FakeEngine()
    engine.config.scheduler.__dict__["max_num_seqs"] = 2
    state = ServerState()
    state.set_ready(engine)

    def die(counts):
        engine.errored = counts.answered == 5

    with pytest.raises(EngineDeadError), BatchJournal(path) as journal:
        await BatchRunner(state, journal, die).run(lines_of(text))
    journal_path = path.with_name("out.jsonl.partial")
    kept = journal_path.read_bytes()
    assert len(kept.splitlines()) == 5
    with pytest.raises(ConfigError, match="--resume"):
        BatchJournal(path)
    assert journal_path.read_bytes() == kept
    journal_path.write_bytes(kept + b'{"id": "half of a li')  # what a kill leaves
    answers, counts = await answers_of(text, path, resume=True)
    assert (counts.earlier, counts.answered, counts.failed) == (5, 15, 0)
    assert [answer["custom_id"] for answer in answers] == [f"c{i}" for i in range(20)]
    assert set(kept.splitlines()) <= set(path.read_bytes().splitlines())


async def test_failed_and_changed_lines_are_tried_again(tmp_path):
    path = tmp_path / "out.jsonl"
    state = ServerState()
    state.set_ready(FakeEngine())
    lines = [line_of("a", {"prompt": "abc", "max_tokens": 1}), line_of("b", {"prompt": "abc", "temperature": 9})]
    with BatchJournal(path) as journal:
        await BatchRunner(state, journal).run(lines_of("\n".join(lines)))
    lines[0] = line_of("a", {"prompt": "abcd", "max_tokens": 1})
    answers, counts = await answers_of("\n".join(lines), path, resume=True)
    assert (counts.earlier, counts.answered, counts.failed) == (0, 1, 1)
    assert answers[0]["response"]["body"]["usage"]["prompt_tokens"] == 5


async def test_a_full_queue_is_waited_for_and_a_line_that_never_fits_is_refused(tmp_path):
    class Narrow(FakeEngine):
        async def add_request(self, *args, **kwargs):
            if len(self.running) >= 2:
                raise QueueFullError("2 requests wait already")
            return await super().add_request(*args, **kwargs)

    lines = [line_of(f"c{i}", {"prompt": "abc", "max_tokens": 4}) for i in range(6)]
    lines += [line_of(f"wide{i}", {"prompt": ["a", "b", "c"], "max_tokens": 4}) for i in range(2)]
    lines.append(line_of("both", {"prompt": ["a", "b"], "max_tokens": 4}))
    answers, _ = await asyncio.wait_for(answers_of("\n".join(lines), tmp_path / "out.jsonl", Narrow()), 60)
    assert [answer["response"]["status_code"] for answer in answers] == [200] * 6 + [503] * 2 + [200]
    assert "wait already" in answers[-2]["error"]["message"]


async def test_a_bug_in_one_line_is_its_own(tmp_path):
    class Buggy(FakeEngine):
        async def add_request(self, request_id, prompt, *args, **kwargs):
            if len(prompt["prompt"]) == 5:
                raise RuntimeError("secret")
            return await super().add_request(request_id, prompt, *args, **kwargs)

    text = "\n".join(line_of(name, {"prompt": name, "max_tokens": 1}) for name in ("one", "three", "two"))
    answers, _ = await answers_of(text, tmp_path / "out.jsonl", Buggy())
    assert [answer["response"]["status_code"] for answer in answers] == [200, 500, 200]
    assert "secret" not in answers[1]["error"]["message"]


def test_journals_that_cannot_be(tmp_path):
    with BatchJournal(tmp_path / "out"), pytest.raises(ConfigError, match="another run"):
        BatchJournal(tmp_path / "out")
    for folder in (tmp_path, Path(), Path("/")):
        with pytest.raises(ConfigError, match="not a regular file"):
            BatchJournal(folder)
    with pytest.raises(ConfigError, match="cannot be written"):
        BatchJournal(tmp_path / "nowhere" / "out")
    (tmp_path / "other.partial").write_text("something else\n")
    with pytest.raises(ConfigError, match="not a journal of a batch at byte 0"):
        BatchJournal(tmp_path / "other", resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.partial"], "an empty journal goes"
    for text in ('{"custom_id":"a","method":"POST"}', "x"):  # without a line end
        (tmp_path / "other.partial").write_text(text)
        with pytest.raises(ConfigError, match="not a journal of a batch at byte 0; delete or rename it"):
            BatchJournal(tmp_path / "other", resume=True)
        assert (tmp_path / "other.partial").read_text() == text, "another program's file stays whole"
    (tmp_path / "half.partial").write_text('{"id":"batch_re')  # all that a killed run has written
    with BatchJournal(tmp_path / "half", resume=True) as journal:
        assert journal.earlier == {}


def test_the_window_keeps_steps_full_and_the_queue_unrefused():
    scheduler = FakeEngine().config.scheduler
    assert window(scheduler) == 2 * scheduler.max_num_seqs
    scheduler.__dict__.update(max_num_queued_reqs=3)
    assert window(scheduler) == 3
