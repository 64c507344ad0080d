"""Requests that wait for a place in the queue of an engine keep their adapters until they have run."""

import pytest

from rustvllm import LLM, SamplingParams
from rustvllm.exceptions import InvalidRequestError
from rustvllm.lora.request import LoRARequest

pytest.importorskip("peft", reason="peft is not installed")
from checkpoints import make
from peft_adapters import ALL_LINEAR, make_adapter

PROMPT = {"prompt_token_ids": [5, 6, 7]}
PARAMS = SamplingParams(temperature=0, max_tokens=4, detokenize=False)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model's folder, and two adapters of it."""
    folder = tmp_path_factory.mktemp("waiting")
    reference = make("llama", {})
    reference.save_pretrained(folder / "model")
    adapters = [LoRARequest(f"adapter-{number}", number, str(folder / str(number))) for number in (1, 2)]
    for adapter in adapters:
        make_adapter(reference, folder / str(adapter.lora_int_id), seed=adapter.lora_int_id, **ALL_LINEAR)
    return folder / "model", adapters


@pytest.fixture
def llm(world):
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 40, "max_model_len": 64, "enable_lora": True}
    with LLM(str(world[0]), max_cpu_loras=1, max_num_queued_reqs=1, **options) as llm:
        yield llm


def wait(llm):
    return [output.outputs[0].token_ids for output in llm.wait_for_completion(use_tqdm=False)]


def test_an_adapter_that_is_removed_or_wanted_for_another_stays_for_those_that_wait(world, llm):
    _, (first, second) = world
    for adapter in (None, first, first):  # the engine's queue has room for one
        llm.enqueue(PROMPT, PARAMS, lora_request=adapter)
    expected = wait(llm)
    assert expected[0] != expected[1]

    for adapter in (None, first, first):
        llm.enqueue(PROMPT, PARAMS, lora_request=adapter)
    with pytest.raises(InvalidRequestError, match="1 adapters are in memory and in use, and max_cpu_loras is 1"):
        llm.enqueue(PROMPT, PARAMS, lora_request=second)
    assert llm.llm_engine.remove_lora(1)
    assert wait(llm) == expected
    llm.enqueue(PROMPT, PARAMS, lora_request=second)
    assert len(llm.llm_engine.engine_core.core.executor._runner.adapters) == 1, "the first is gone by now"
    assert wait(llm) != expected[1:2]
