"""Every variant whose blocks the core runs in one call, against transformers: logits and greedy ids at every step."""

import pytest
import torch
from checkpoints import VARIANTS, assert_matches, load, make, prompts
from naive_schedule import NaiveEngine, Request

from rustvllm import _core
from rustvllm.layers.cpu.linear import CoreLinear
from rustvllm.layers.cpu.norm import use_core_norms
from rustvllm.layers.linear import Linear
from rustvllm.worker.cpu_decoder import use_core_decoder

FAMILIES = {
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "opt", "gpt-neox", "gemma2", "gemma3", "qwen3-moe", "mixtral",
    "gpt-oss", "smollm3", "granite", "olmo2", "olmo3", "qwen2-moe", "glm4-moe", "dots1",
}  # fmt: skip
OTHER_PLANS = {"opt-post-norm-projected", "opt-no-final-norm", "opt-bare"}
"""Norms after the parts, none at the end, norms without parameters: these stay with their modules."""
FORMS = {"bf16": ("bf16", None), "int8": ("int8", None), "int8-g32": ("int8", 32), "int4-g32": ("int4", 32)}
"""Kind and group size of the weights."""


def load_in_one_call(folder, kind=None, group_size=None):
    """The model by the core, with weights of a kind, which ``weight`` has as they were rounded."""
    model, threads = load(folder), _core.CpuThreads(2)
    for module in model.modules():
        if isinstance(module, Linear):
            module.kernel = CoreLinear(threads, module.weight, module.bias, kind, group_size)
            module.weight.copy_(module.kernel.unpack(module.weight.shape[0]))
    use_core_norms(model, threads)
    use_core_decoder(model)
    return model


def check(reference, model, *, is_one_call=True):
    requests = [Request(prompt, 24) for prompt in prompts(97, [1, 4, 9, 17, 30])]
    for index, request in enumerate(requests):
        request.arrives = index  # prompts come in while others decode
    requests[2].preempt_at = (5,)
    with torch.inference_mode():
        NaiveEngine(model, budget=16, chunk=5).run(requests)
    assert not is_one_call or all(ns > 0 for ns in model.decoder_kernel.times), "the modules ran"
    clear = sum(assert_matches(reference, request) for request in requests)
    assert clear > 0.9 * sum(len(request.output) for request in requests), "margins too small to say anything"


@pytest.mark.parametrize("variant", [name for name, (family, _) in VARIANTS.items() if family in FAMILIES])
def test_one_call_equals_transformers(variant, tmp_path):
    reference = make(*VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    with torch.inference_mode():
        model = load_in_one_call(tmp_path)
    is_one_call = model.decoder_kernel is not None
    assert is_one_call == (variant not in OTHER_PLANS)
    check(reference, model, is_one_call=is_one_call)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "variant", ["llama", "gpt-neox", "gpt-neox-sequential-tied", "gemma2", "gemma3", "granite", "olmo2"]
)
def test_narrow_weights_equal_transformers_with_the_same_numbers(variant, form, tmp_path):
    reference = make(*VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    with torch.inference_mode():
        model = load_in_one_call(tmp_path, *FORMS[form])
        parameters, changed = dict(reference.named_parameters()), 0
        stored = [(parameters[model.prefixes[0] + name], tensor) for name, tensor in model.checkpoint_tensors().items()]
        if model.lm_head is not None:
            stored.append((reference.get_output_embeddings().weight, model.lm_head.weight))
        assert len(stored) == len(parameters)
        for theirs, ours in stored:
            changed += not torch.equal(theirs, ours)
            theirs.copy_(ours)
    assert changed >= 4 * reference.config.num_hidden_layers, "nothing was rounded"
    check(reference, model)
