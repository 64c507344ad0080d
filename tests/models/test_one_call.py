"""Every variant whose blocks the core runs in one call, against transformers: logits and greedy ids at every step."""

import pytest
import torch
from checkpoints import VARIANTS, assert_matches, load, make, prompts
from naive_schedule import NaiveEngine, Request

from rustvllm import _core
from rustvllm.layers.cpu_linear import CoreLinear
from rustvllm.layers.cpu_norm import use_core_norms
from rustvllm.layers.linear import Linear
from rustvllm.worker.cpu_decoder import use_core_decoder

FAMILIES = {"gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "opt"}
OTHER_PLANS = {"opt-post-norm-projected", "opt-no-final-norm", "opt-bare"}
"""Norms after the parts, none at the end, norms without parameters: these stay with their modules."""


@pytest.mark.parametrize("variant", [name for name, (family, _) in VARIANTS.items() if family in FAMILIES])
def test_one_call_equals_transformers(variant, tmp_path):
    reference = make(*VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    model, threads = load(tmp_path), _core.CpuThreads(2)
    for module in model.modules():
        if isinstance(module, Linear):
            module.kernel = CoreLinear(threads, module.weight, module.bias)
    use_core_norms(model, threads)
    use_core_decoder(model)
    assert (model.decoder_kernel is None) == (variant in OTHER_PLANS)
    requests = [Request(prompt, 24) for prompt in prompts(97, [1, 4, 9, 17, 30])]
    for index, request in enumerate(requests):
        request.arrives = index  # prompts come in while others decode
    requests[2].preempt_at = (5,)
    with torch.inference_mode():
        NaiveEngine(model, budget=16, chunk=5).run(requests)
    assert variant in OTHER_PLANS or all(ns > 0 for ns in model.decoder_kernel.times), "the modules ran"
    clear = sum(assert_matches(reference, request) for request in requests)
    assert clear > 0.9 * sum(len(request.output) for request in requests), "margins too small to say anything"
