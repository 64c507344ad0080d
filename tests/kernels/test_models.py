"""Whole models over the Triton backend: transformers' logits at every step, prompts in chunks together with decodes."""

import pytest
import torch
from checkpoints import VARIANTS, assert_matches, load, make, prompts
from naive_schedule import NaiveEngine, Request

from rustvllm import LLM, SamplingParams
from rustvllm.attention.triton_backend import TritonAttentionBackend
from rustvllm.worker.dense_layers import make_batch_invariant

PROMPTS = ["Once upon a time"]
FEWER_LAYERS = {"gpt2": {"n_layer": 2}, "gemma3": {"num_hidden_layers": 3}}
"""A first and a later one are enough for kernels; of gemma3 the third, its first without a window, too."""


def make_smaller(variant):
    kind, options = VARIANTS[variant]
    return make(kind, options | FEWER_LAYERS.get(kind, {"num_hidden_layers": 2}))


@pytest.mark.parametrize(
    "variant",
    [
        "gpt2", "llama", "gemma3", "gpt-neox", "gpt-neox-sequential-tied", "opt-post-norm-projected", "smollm3",
        "granite", "olmo3",
    ],
)  # fmt: skip
def test_pieces_of_prompts_in_one_step_with_decodes(variant, device, tmp_path):
    reference = make_smaller(variant)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, device=str(device))
    requests = [Request(prompt, 3) for prompt in prompts(97, [1, 4, 9, 21])]
    for i, request in enumerate(requests):
        request.arrives = i
    requests[1].preempt_at = (2,)
    engine = NaiveEngine(model, budget=16, chunk=8, block_size=8, attention_backend="triton", poison=True)
    engine.run(requests)
    assert engine.runner.backend.name == "triton"
    assert any(step.num_reqs > 1 and step.max_num_scheduled_tokens > 1 for step in engine.steps)
    assert requests[1].num_preemptions == 1
    clear = sum(assert_matches(reference, request) for request in requests)
    assert clear > 9, "margins too small to say anything"


def test_an_engine_whose_cache_has_eight_bits(device):
    """The embedded model: what is generated, and how likely, hardly changes; memory does."""

    def run(kv_cache_dtype):
        llm = LLM(
            device=device.type,
            dtype="float32",
            attention_backend="triton",
            kv_cache_dtype=kv_cache_dtype,
            num_gpu_blocks_override=40,
            max_model_len=64,
            max_num_seqs=2,
            enforce_eager=True,
        )
        executor = llm.llm_engine.engine_core.core.executor
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=3, logprobs=0), use_tqdm=False)
        caches = executor._runner.kv_caches
        llm.shutdown()
        return outputs, sum(cache.nbytes for cache in caches)

    exact, exact_bytes = run("auto")
    rounded, rounded_bytes = run("fp8")
    assert rounded_bytes * 4 == exact_bytes
    for a, b in zip(exact, rounded, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        difference = abs(a.outputs[0].cumulative_logprob - b.outputs[0].cumulative_logprob)
        assert 0 < difference < 0.3, "rounded, but not by much"


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("variant", ["llama-tied"])
def test_batch_invariant_logits_have_the_same_bits_in_any_company(variant, device, tmp_path):
    reference = make_smaller(variant)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, device=str(device))
    make_batch_invariant(model)
    texts = prompts(97, [3, 12])

    def run(requests, **options):
        engine = NaiveEngine(model, block_size=8, attention_backend="triton", **options)
        spec, dtype = model.kv_cache_spec, model.embed_tokens.weight.dtype
        engine.runner.backend = TritonAttentionBackend(spec, dtype, device, batch_invariant=True)
        engine.run(requests)
        return [torch.stack(request.logits) for request in requests]

    together = run([Request(text, 2) for text in texts], chunk=7)
    for text, expected in zip(texts, together, strict=True):
        (alone,) = run([Request(text, 2)])
        assert torch.equal(alone, expected)
    assert_matches(reference, Request(texts[1], 2, output=together[1].argmax(-1).tolist(), logits=list(together[1])))
