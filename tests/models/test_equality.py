"""Every model variant against transformers: logits and greedy ids at every step, however the steps are cut."""

import pytest
import torch
from checkpoints import VARIANTS, Remembered, assert_diverse, assert_matches, load, make, prompts
from naive_schedule import NaiveEngine, Request

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 30, 41]
NUM_OUTPUTS = 24


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request, tmp_path_factory):
    """A transformers model and ours, loaded from what it saved."""
    reference = make(*VARIANTS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return Remembered(reference), load(folder)


def run(model, requests, **options):
    NaiveEngine(model, **options).run(requests)
    assert_diverse([r.output for r in requests])
    return requests


def greedy(lengths=LENGTHS, **fields):
    return [Request(prompt, NUM_OUTPUTS, **fields) for prompt in prompts(97, lengths)]


def check(reference, requests):
    clear = sum(assert_matches(reference, r) for r in requests)
    assert clear > 0.9 * sum(len(r.output) for r in requests), "margins too small to say anything"


def test_whole_prompts_together(pair):
    reference, model = pair
    check(reference, run(model, greedy()))


@pytest.mark.parametrize("attention_backend", ["cpu", "torch"])
def test_chunks_mixed_with_decodes(pair, attention_backend):
    reference, model = pair
    requests = greedy()
    for i, r in enumerate(requests):
        r.arrives = i  # prompts come in while others decode
    engine = NaiveEngine(model, budget=16, chunk=5, attention_backend=attention_backend)
    engine.run(requests)
    mixed = [s for s in engine.steps if s.num_reqs > 1 and s.max_num_scheduled_tokens > 1]
    assert len(mixed) > 5
    check(reference, requests)


def test_recompute_after_preemption(pair):
    reference, model = pair
    requests = greedy()
    for r in requests[::2]:
        r.preempt_at = (1, 7, 8)
    run(model, requests, chunk=6)
    assert all(r.num_preemptions == 3 for r in requests[::2])
    check(reference, requests)


def test_prefix_blocks_shared_within_the_step_that_fills_them(pair):
    reference, model = pair
    common = prompts(97, [21], seed=5)[0]
    requests = [Request(common + tail, NUM_OUTPUTS) for tail in prompts(97, [1, 2, 3, 4, 5, 6])]
    engine = NaiveEngine(model, share_prefixes=True)
    engine.run(requests)
    assert engine.steps[0].num_reqs == 6, "all in one step, or nothing was shared within it"
    assert sum(r.num_shared_tokens for r in requests) == 5 * 20
    check(reference, requests)


@pytest.mark.parametrize("torch_options", [None, {"max_gather_bytes": 4000, "max_mask_elements": 50}])
def test_remains_of_others_do_not_matter(pair, torch_options):
    reference, model = pair
    requests = greedy()
    run(model, requests, poison=True, block_size=7, backend_options=torch_options, chunk=9)
    check(reference, requests)


def test_longest_sequence(pair):
    reference, model = pair
    requests = [Request(prompts(97, [100])[0], 28), Request(prompts(97, [127], seed=1)[0], 1)]
    NaiveEngine(model, chunk=33).run(requests)
    check(reference, requests)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "variant",
    [
        "gpt2", "llama-rope-llama3", "mistral-window", "qwen2", "qwen3", "phi3-partial", "gemma2", "gemma3",
        "opt", "gpt-neox", "smollm3", "granite", "olmo3",
    ],
)  # fmt: skip
def test_half_precision_stays_close(variant, dtype, tmp_path):
    reference = make(*VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, dtype=dtype)
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    requests = [Request(p, 4) for p in prompts(97, [3, 9, 20])]
    NaiveEngine(model, chunk=8).run(requests)
    reference.to(dtype)
    for r in requests:
        # transformers' own rounding in the same dtype is of this size too
        assert_matches(reference, r, atol=0.25 if dtype == torch.bfloat16 else 0.05, margin=1.0)
