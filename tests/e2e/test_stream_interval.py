"""``stream_interval`` of engines: how many tokens come in each output, and that all of them come."""

import asyncio
from itertools import chain

import pytest

from rustvllm import AsyncEngineArgs, AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from rustvllm.exceptions import EngineDeadError
from rustvllm.sampling_params import RequestOutputKind

DELTA = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
WHOLE = DELTA.clone(output_kind=RequestOutputKind.FINAL_ONLY)
PROMPT = [7] * 20


@pytest.fixture(params=[1, 4])
def engine(request):
    engine = LLMEngine.from_engine_args(
        EngineArgs(executor="sim", num_gpu_blocks_override=200, stream_interval=request.param)
    )
    engine.interval = request.param
    yield engine
    engine.shutdown()


def run(engine, *every):
    """Outputs of requests that run together, each one's in their order."""
    outputs = {engine.add_request(f"r{index}", PROMPT, params): [] for index, params in enumerate(every)}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return list(outputs.values())


def parts(outputs, sample=0):
    """The token ids of a sample in each output that has some."""
    found = [one.token_ids for output in outputs for one in output.outputs if one.index == sample]
    return [list(ids) for ids in found if ids]


def joined(lists):
    return list(chain.from_iterable(lists))


def sizes(num_tokens, interval):
    """The naive rule: the first token alone, then so many at a time, and with the end what is left."""
    counts, left = [1], num_tokens - 1
    while left:
        counts.append(min(interval, left))
        left -= counts[-1]
    return counts


@pytest.mark.parametrize("asked", [None, 1, 2, 3, 5, 10, 2**31 - 1])
def test_outputs_hold_as_many_tokens_as_the_larger_of_both_numbers(engine, asked):
    [[whole], outputs] = run(engine, WHOLE, DELTA.clone(stream_interval=asked))
    delivered = parts(outputs)
    assert [len(ids) for ids in delivered] == sizes(11, max(engine.interval, asked or 1))
    assert joined(delivered) == list(whole.outputs[0].token_ids)
    assert "".join(output.outputs[0].text for output in outputs) == whole.outputs[0].text
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_cumulative_outputs_come_as_seldom_and_whole_ones_once(engine):
    cumulative = DELTA.clone(output_kind=RequestOutputKind.CUMULATIVE, stream_interval=5)
    [outputs, ended] = run(engine, cumulative, WHOLE.clone(stream_interval=5))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 6, 11]
    assert len(ended) == 1
    assert ended[0].outputs[0].text == outputs[-1].outputs[0].text


def test_requests_next_to_it_keep_their_own_pace(engine):
    every = [DELTA.clone(stream_interval=interval, seed=interval, temperature=1) for interval in (1, 2, 4, 7, 20)]
    alone = [run(engine, params.clone(stream_interval=None))[0] for params in every]
    for params, outputs, expected in zip(every, run(engine, *every), alone, strict=True):
        delivered = parts(outputs)
        assert [len(ids) for ids in delivered] == sizes(11, max(engine.interval, params.stream_interval))
        assert joined(delivered) == joined(parts(expected))


def test_each_sample_has_its_own_count_and_log_probabilities_come_with_their_tokens(engine):
    params = DELTA.clone(n=3, temperature=1, seed=5, logprobs=1, prompt_logprobs=0, stream_interval=4)
    [[whole], outputs] = run(engine, params.clone(output_kind=RequestOutputKind.FINAL_ONLY), params)
    for sample in range(3):
        assert [len(ids) for ids in parts(outputs, sample)] == [1, 4, 4, 2]
        assert joined(parts(outputs, sample)) == list(whole.outputs[sample].token_ids)
        logprobs = [one.logprobs for output in outputs for one in output.outputs if one.index == sample]
        assert joined(logprobs) == whole.outputs[sample].logprobs
    assert [output.prompt_logprobs is not None for output in outputs].count(True) == 1


def test_progress_of_the_prompt_and_the_first_token_do_not_wait():
    args = EngineArgs(executor="sim", num_gpu_blocks_override=200, max_num_batched_tokens=16, max_num_seqs=4)
    engine = LLMEngine.from_engine_args(args)
    [outputs] = run(engine, DELTA.clone(prompt_progress=True, stream_interval=8))
    engine.shutdown()
    assert [output.num_computed_prompt_tokens for output in outputs[:2]] == [16, 20]
    assert [len(ids) for ids in parts(outputs)] == [1, 8, 2]


@pytest.mark.parametrize("place", [1, 2, 6])
def test_an_abort_brings_what_was_made(engine, place):
    params = DELTA.clone(max_tokens=200, stream_interval=100)
    engine.add_request("r", PROMPT, params)
    outputs = []
    for _ in range(place):
        outputs += engine.step()
    engine.abort_request("r")
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].finish_reason == "abort"
    num_tokens = sum(len(ids) for ids in parts(outputs))
    [[whole]] = run(engine, WHOLE.clone(max_tokens=num_tokens))
    assert num_tokens >= place
    assert joined(parts(outputs)) == list(whole.outputs[0].token_ids)


def test_a_stop_string_brings_what_was_made(engine):
    [[whole]] = run(engine, WHOLE)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    [outputs] = run(engine, DELTA.clone(stop=[stop], stream_interval=100))
    assert "".join(output.outputs[0].text for output in outputs) == text[: text.index(stop)]
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
async def test_an_asynchronous_engine_streams_so(monkeypatch, process):
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", str(int(process)))
    args = AsyncEngineArgs(executor="sim", num_gpu_blocks_override=200, sim_step_time=2.0, stream_interval=3)
    engine = AsyncLLM.from_engine_args(args)

    async def one(number, params):
        return [output async for output in engine.generate(PROMPT, params, f"r{number}")]

    try:
        intervals = [None, 1, 5, 50]
        every = [DELTA.clone(stream_interval=interval, max_tokens=40) for interval in intervals]
        [whole], *streams = await asyncio.gather(
            one("whole", WHOLE.clone(max_tokens=40)), *(one(number, params) for number, params in enumerate(every))
        )
        for interval, outputs in zip(intervals, streams, strict=True):
            counts = [len(ids) for ids in parts(outputs)]
            least = max(interval or 1, 3)
            assert all(count >= least for count in counts[1:-1]), "fewer at a time, unless the reader was late"
            assert len(counts) <= len(sizes(40, least))
            assert (interval == 50) == (len(counts) <= 2)
            assert joined(parts(outputs)) == list(whole.outputs[0].token_ids)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
async def test_an_engine_that_ends_takes_no_tokens_along(monkeypatch, process):
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", str(int(process)))
    args = AsyncEngineArgs(executor="sim", num_gpu_blocks_override=200, sim_step_time=2.0)
    engine = AsyncLLM.from_engine_args(args)
    steady = await engine.add_request("steady", PROMPT, DELTA.clone(max_tokens=3000))
    waiting = await engine.add_request("waiting", PROMPT, DELTA.clone(max_tokens=3000, stream_interval=3000))
    got = {"steady": [], "waiting": []}

    async def read(name, stream):
        async for output in stream:
            got[name] += output.outputs[0].token_ids

    tasks = [asyncio.create_task(read("steady", steady)), asyncio.create_task(read("waiting", waiting))]
    while len(got["steady"]) < 20:  # noqa: ASYNC110 -- what is waited for happens in another thread
        await asyncio.sleep(0.005)
    assert len(got["waiting"]) == 1
    engine.shutdown()
    for failure in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(failure, EngineDeadError)
    assert len(got["waiting"]) > 15
    length = min(map(len, got.values()))
    assert got["waiting"][:length] == got["steady"][:length]
