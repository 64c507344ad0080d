"""Deltas gathered into outputs: merged until the caller reads, never lost, never given twice."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rustvllm.engine.request.state import BestOf, RequestState
from rustvllm.exceptions import (
    EngineDeadError,
    GrammarsFullError,
    InvalidRequestError,
    QueueFullError,
    QueueTimeoutError,
    RequestFailedError,
)
from rustvllm.sampling_params import RequestOutputKind


def make(kind, n=1, hidden=()):
    return RequestState("r", "p", [1], kind, [(10 + i, f"r{i}") for i in range(n)], frozenset(hidden))


def delta(
    key=10,
    text="",
    ids=(),
    finish=None,
    stop=None,
    error=None,
    kind=None,
    is_step_error=False,
    cached=0,
    scheduled=0.0,
    last=0.0,
    computed=0,
    logprobs=(),
):
    return SimpleNamespace(
        key=key,
        new_text=text,
        new_token_ids=list(ids),
        finish_reason=finish,
        stop_reason=stop,
        error=error,
        error_kind=kind,
        is_step_error=is_step_error,
        error_param="prompt" if kind == "invalid" else None,
        num_cached_tokens=cached,
        num_accepted_prediction_tokens=0,
        num_rejected_prediction_tokens=0,
        num_calls=0,
        first_scheduled_ts=scheduled,
        first_token_ts=last,
        last_token_ts=last,
        num_computed_prompt_tokens=computed,
        new_logprobs=list(logprobs),
        new_prompt_logprobs=[],
        pooled=None,
    )


STEPS = st.lists(st.tuples(st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3), st.booleans()), max_size=20)


@given(STEPS)
def test_deltas_add_up_to_the_cumulative_output_wherever_they_are_taken(steps):
    """The third element says whether the reader looks after this step."""
    by_delta, by_total = make(RequestOutputKind.DELTA), make(RequestOutputKind.CUMULATIVE)
    text, ids = "", []
    for new_text, new_ids, look in [*steps, ("", [], True)]:
        for state in (by_delta, by_total):
            state.apply(delta(text=new_text, ids=new_ids))
        if look:
            [part], [total] = by_delta.take().outputs, by_total.take().outputs
            text, ids = text + part.text, ids + part.token_ids
            assert (text, ids) == (total.text, total.token_ids)
            assert not by_delta.ready
    assert text == "".join(step[0] for step in steps)


def test_final_only_waits_for_the_end():
    state = make(RequestOutputKind.FINAL_ONLY)
    state.apply(delta(text="a", ids=[1]))
    assert not state.ready
    state.apply(delta(text="b", ids=[2], finish="length"))
    assert state.ready
    output = state.take()
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.finished) == ("ab", [1, 2], True)


def test_samples_end_one_by_one():
    state = make(RequestOutputKind.DELTA, n=2)
    state.apply(delta(11, text="x", ids=[1], finish="stop", stop="y"))
    output = state.take()
    assert [(sample.index, sample.finish_reason, sample.stop_reason) for sample in output.outputs] == [(1, "stop", "y")]
    assert not output.finished
    assert state.unfinished_ids() == ["r0"]
    state.apply(delta(10, finish="length"))
    output = state.take()
    assert [sample.index for sample in output.outputs] == [0]
    assert output.finished
    assert output.metrics.finished_time is not None


@pytest.mark.parametrize(("stop", "shown"), [(7, None), (8, 8), ("s", "s"), (None, None)])
def test_further_eos_ids_are_no_stop_reason(stop, shown):
    state = make(RequestOutputKind.CUMULATIVE, hidden=[7])
    state.apply(delta(finish="stop", stop=stop))
    assert state.take().outputs[0].stop_reason == shown


def test_what_comes_after_the_end_is_dropped():
    state = make(RequestOutputKind.CUMULATIVE)
    state.apply(delta(text="a", ids=[1], finish="stop"))
    state.apply(delta(text="b", ids=[2], finish="abort"))
    assert state.take().outputs[0].text == "a"
    assert state.take().outputs[0].finish_reason == "stop"


def test_errors_carry_their_cause():
    state = make(RequestOutputKind.CUMULATIVE)
    state.apply(delta(finish="error", error="the step failed", is_step_error=True), "RuntimeError: boom")
    assert state.take().error == "the step failed; RuntimeError: boom"


def test_metrics_and_cached_tokens():
    state = make(RequestOutputKind.CUMULATIVE)
    state.apply(delta(scheduled=5.0, cached=16))
    assert state.take().metrics.first_token_time is None
    state.apply(delta(ids=[1], last=6.0))
    state.apply(delta(ids=[2], last=7.0, scheduled=9.0, finish="length"))
    output = state.take()
    assert (output.metrics.first_scheduled_time, output.metrics.first_token_time) == (5.0, 6.0)
    assert output.num_cached_tokens == 16


def test_abort():
    state = make(RequestOutputKind.FINAL_ONLY, n=2)
    state.apply(delta(10, finish="stop"))
    state.abort()
    assert [sample.finish_reason for sample in state.take().outputs] == ["stop", "abort"]
    assert state.finished


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("invalid", InvalidRequestError),
        ("queue_full", QueueFullError),
        ("queue_timeout", QueueTimeoutError),
        ("grammars_full", GrammarsFullError),
        ("refused", InvalidRequestError),
        ("engine_dead", EngineDeadError),
        ("failed", RequestFailedError),
    ],
)
def test_a_failure_is_raised_as_what_it_is(kind, error):
    state = make(RequestOutputKind.FINAL_ONLY)
    state.apply(delta(finish="error", error="no room", kind=kind))
    with pytest.raises(error, match="no room") as caught:
        raise state.failure()
    assert getattr(caught.value, "param", None) == ("prompt" if kind == "invalid" else None)


@pytest.mark.parametrize(
    ("error", "is_step_error", "message"),
    [
        ("the model failed", True, "the model failed; ValueError: now"),
        ("the model's output is not finite", False, "the model's output is not finite"),
        ("the grammar could not be compiled", False, "the grammar could not be compiled"),
    ],
)
def test_the_error_of_a_step_explains_only_what_came_of_it(error, is_step_error, message):
    state = make(RequestOutputKind.FINAL_ONLY)
    state.apply(delta(finish="error", error=error, kind="failed", is_step_error=is_step_error), "ValueError: now")
    assert str(state.failure()) == message


def test_progress_of_the_prompt_is_news_until_the_first_token():
    state = RequestState("r", "p", [1] * 9, RequestOutputKind.DELTA, [(10, "r")], frozenset(), prompt_progress=True)
    state.apply(delta(computed=4, scheduled=1.0, last=2.0))
    assert state.ready
    output = state.take()
    assert (output.outputs, output.num_computed_prompt_tokens, output.prompt_progress_time) == ([], 4, 2.0)
    assert not state.ready
    state.apply(delta(computed=8, last=3.0))
    state.apply(delta(text="a", ids=[1], last=4.0))
    output = state.take()
    assert (output.outputs[0].text, output.num_computed_prompt_tokens, output.prompt_progress_time) == ("a", 9, 4.0)
    state.apply(delta(text="b", ids=[2], finish="length"))
    assert state.take().num_computed_prompt_tokens is None


def test_progress_is_no_news_for_who_does_not_ask():
    state = make(RequestOutputKind.DELTA)
    state.apply(delta(computed=4))
    assert not state.ready


@pytest.mark.parametrize("shows", [True, False])
def test_best_of_returns_the_likeliest_first_and_counts_the_others(shows):
    samples = [(10 + i, f"r{i}") for i in range(4)]
    choice = BestOf(2, shows_logprobs=shows)
    state = RequestState(
        "r", "p", [1], RequestOutputKind.FINAL_ONLY, samples, frozenset(), with_logprobs=True, choice=choice
    )
    for index, value in enumerate((-3.0, -1.0, -4.0, -1.0)):
        candidates = [(0, [(index, value, 1, b"x")])]
        state.apply(delta(10 + index, ids=[index], logprobs=candidates, finish="length", text="abcd"[index]))
    output = state.take()
    assert [(sample.index, sample.text, sample.cumulative_logprob) for sample in output.outputs] == [
        (0, "b", -1.0),
        (1, "d", -1.0),
    ]
    assert output.num_unreturned_tokens == 2
    assert [sample.logprobs is not None for sample in output.outputs] == [shows] * 2


def test_the_last_token_is_the_last_of_all_samples():
    state = make(RequestOutputKind.CUMULATIVE, n=2)
    state.apply(delta(key=10, ids=[1], last=9.0))
    state.apply(delta(key=11, ids=[2], last=8.0))  # read after the other's, sampled before it
    assert state.metrics.last_token_time == 9.0


def test_news_of_many_samples_are_taken_some_at_a_time():
    state = make(RequestOutputKind.DELTA, n=300)
    for index in reversed(range(300)):
        state.apply(delta(key=10 + index, text=str(index), ids=[index], finish="stop"))
    taken = []
    while state.ready:
        taken.append(state.take(128))
    assert [len(output.outputs) for output in taken] == [128, 128, 44]
    assert [output.finished for output in taken] == [False, False, True]
    texts = {sample.index: sample.text for output in taken for sample in output.outputs}
    assert texts == {index: str(index) for index in range(300)}
