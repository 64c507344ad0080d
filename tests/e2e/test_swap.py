"""Preemption by swap with a real model: the tokens are those of a pool that is never short of blocks."""

import pytest

from rustvllm import LLM, SamplingParams
from rustvllm.exceptions import ConfigError

NUM_PROMPTS = 16
MAX_MODEL_LEN = 96
SMALL_POOL = 25  # blocks of 8 tokens, the null one included: two requests of full length


PROMPTS = 16
MAX_MODEL_LEN = 96
SMALL_POOL = 25  # blocks of 8 tokens, the null one included: two requests of full length


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the worker then leaves torch's threads alone


PROMPTS = [[3 + (7 * i + 11 * j) % 200 for j in range(5 + 3 * i)] for i in range(NUM_PROMPTS)]
PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=40, ignore_eos=True, detokenize=False)
    for i in range(NUM_PROMPTS)
]


def generate(**options):
    """Token ids of every prompt, and the counters of the scheduler."""
    with LLM(
        device="cpu", dtype="float32", max_model_len=MAX_MODEL_LEN, block_size=8, max_num_seqs=8, **options
    ) as llm:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
        scheduler = llm.llm_engine.engine_core.core.scheduler
        stats = scheduler.stats()
        scheduler.check_invariants()
        tokens = [list(result.outputs[0].token_ids) for result in results]
        per_block = llm.llm_engine.engine_core.core.executor._worker.num_bytes_per_block
    assert all(len(output) == 40 for output in tokens)
    assert stats["num_free_blocks"] == stats["num_usable_blocks"]
    return tokens, stats, per_block


@pytest.fixture(scope="module")
def expected():
    """What a pool that is never short of blocks gives, and the bytes of one block."""
    tokens, stats, per_block = generate()
    assert stats["num_preemptions"] == 0
    assert len({tuple(output) for output in tokens}) > NUM_PROMPTS / 2, "output that is all the same proves nothing"
    return tokens, per_block


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 16}])
def test_swapping_changes_no_token(expected, options):
    tokens, stats, _ = generate(num_gpu_blocks_override=SMALL_POOL, preemption_mode="swap", swap_space=0.05, **options)
    assert stats["num_swapped_out"] > 0
    assert stats["num_swapped_in"] == stats["num_swapped_out"] == stats["num_preemptions"]
    assert tokens == expected[0]


def test_without_room_in_the_swap_space_a_victim_is_computed_again(expected):
    for num_cpu_blocks in (1, 12):
        tokens, stats, per_block = generate(
            num_gpu_blocks_override=SMALL_POOL,
            preemption_mode="swap",
            swap_space=num_cpu_blocks * expected[1] / 2**30,
        )
        assert per_block == expected[1]
        assert stats["num_free_cpu_blocks"] == num_cpu_blocks
        assert stats["num_swapped_out"] < stats["num_preemptions"]
        assert (stats["num_swapped_out"] > 0) == (num_cpu_blocks > 1)
        assert tokens == expected[0]


def test_recomputing_changes_no_token_either(expected):
    tokens, stats, _ = generate(num_gpu_blocks_override=SMALL_POOL, watermark=0.1, max_look_past=2)
    assert stats["num_preemptions"] > 0
    assert stats["num_swapped_out"] == 0
    assert tokens == expected[0]


def test_more_swap_space_than_there_is_memory_is_refused_with_what_would_work():
    with pytest.raises(
        ConfigError, match=r"swap_space is 1e\+06 GiB, but .* GiB of CPU memory are free.*set it to .* or less"
    ):
        LLM(device="cpu", preemption_mode="swap", swap_space=1e6)
