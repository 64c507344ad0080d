"""Whole models over the Triton backend: transformers' logits at every step, prompts cut into pieces beside decodes."""

import pytest
from checkpoints import VARIANTS, assert_matches, load, make, prompts
from naive_schedule import NaiveEngine, Request


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_pieces_of_prompts_beside_decodes(variant, device, tmp_path):
    reference = make(*VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, device=str(device))
    requests = [Request(prompt, 4) for prompt in prompts(97, [1, 4, 9, 21])]
    for i, request in enumerate(requests):
        request.arrives = i
    requests[1].preempt_at = (2,)
    engine = NaiveEngine(model, budget=16, chunk=8, block_size=8, attention_backend="triton", poison=True)
    engine.run(requests)
    assert engine.runner.backend.name == "triton"
    assert any(step.num_reqs > 1 and step.max_num_scheduled_tokens > 1 for step in engine.steps)
    assert requests[1].num_preemptions == 1
    clear = sum(assert_matches(reference, request) for request in requests)
    assert clear > 12, "margins too small to say anything"
