"""``skip_reading_prefix_cache``: the prompt is computed whole, whatever is cached, and its blocks are for others."""

import pytest

from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams

LENGTH = 40
PROMPT = {"prompt_token_ids": [3 + 5 * i % 200 for i in range(LENGTH)]}
PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SKIPS = PLAIN.clone(skip_reading_prefix_cache=True)
BEGINNING = [3 + 7 * i % 200 for i in range(16)]
PROMPTS = [{"prompt_token_ids": [*BEGINNING, *range(20, 21 + 3 * i)]} for i in range(12)]


def make(**options):
    return LLM(device="cpu", dtype="float32", max_model_len=96, block_size=8, max_num_seqs=8, **options)


@pytest.fixture(scope="module")
def llm():
    with make() as llm:
        yield llm


def run(llm, params, prompt=PROMPT):
    [output] = llm.generate(prompt, params, use_tqdm=False)
    return output.num_cached_tokens, [list(sample.token_ids) for sample in output.outputs]


def test_a_prompt_is_computed_whole_and_its_blocks_are_found_by_the_next(llm):
    assert llm.reset_prefix_cache()
    cached, tokens = run(llm, SKIPS)
    assert cached == 0
    assert run(llm, PLAIN) == (32, tokens), "what it computed is cached"
    assert run(llm, SKIPS) == (0, tokens), "and it finds nothing itself"
    assert run(llm, PLAIN) == (32, tokens)
    for neutral in (None, False):
        assert run(llm, PLAIN.clone(skip_reading_prefix_cache=neutral)) == (32, tokens)


def test_samples_share_one_prompt_that_is_computed_whole(llm):
    run(llm, PLAIN)
    drawn = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True)
    expected = run(llm, drawn)
    queries = llm.llm_engine.engine_core.handle.stats()["prefix_cache_queries"]
    assert run(llm, drawn.clone(skip_reading_prefix_cache=True)) == (0, expected[1])
    assert llm.llm_engine.engine_core.handle.stats()["prefix_cache_queries"] == queries, "nothing was looked up"


def test_beams_search_from_a_prompt_that_is_computed_whole(llm):
    search = SamplingParams(n=3, use_beam_search=True, max_tokens=5)
    run(llm, PLAIN)
    cached, beams = run(llm, search)
    assert cached == 32
    assert run(llm, search.clone(skip_reading_prefix_cache=True)) == (0, beams)


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 25},
        {"num_gpu_blocks_override": 25, "preemption_mode": "swap", "swap_space": 0.05},
        {"num_gpu_blocks_override": 25, "max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 25, "async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["recompute", "swap", "chunks", "async", "drafts"],
)
def test_preempted_requests_find_nothing_either(llm, options):
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=30, ignore_eos=True, detokenize=False)
        for i in range(len(PROMPTS))
    ]
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    with make(**options) as small:
        skipping = [one.clone(skip_reading_prefix_cache=True) for one in params]
        outputs = small.generate(PROMPTS, skipping, use_tqdm=False)
        stats = small.llm_engine.engine_core.core.scheduler.stats()
        small.llm_engine.engine_core.core.scheduler.check_invariants()
        assert (stats["num_preemptions"] > 0) == ("num_gpu_blocks_override" in options)
        assert (stats["prefix_cache_queries"], stats["preempted_cache_queries"]) == (0, 0)
        assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        mixed = [one if i % 3 else other for i, (one, other) in enumerate(zip(params, skipping, strict=True))]
        outputs = small.generate(PROMPTS, mixed, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert not any(output.num_cached_tokens for output in outputs[::3])
        assert any(output.num_cached_tokens for output in outputs), "the others may read"


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
async def test_an_engine_behind_asyncio_is_told(monkeypatch, process):
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", str(int(process)))
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(executor="sim", num_gpu_blocks_override=200, block_size=8))
    try:
        found = []
        for number, skips in enumerate([True, False, True, None]):
            params = SamplingParams(max_tokens=2, skip_reading_prefix_cache=skips)
            async for output in engine.generate(PROMPT, params, f"r{number}"):
                last = output
            found.append(last.num_cached_tokens)
        assert found == [0, 32, 0, 32]
    finally:
        engine.shutdown()
