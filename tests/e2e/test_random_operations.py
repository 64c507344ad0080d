"""Random requests on the CPU, with narrow weights and too few blocks: each is bit-equal to itself alone."""

import json
import random

import pytest
import torch

from coming_and_going import outputs_of
from rustvllm import LLMEngine, SamplingParams
from rustvllm.config.engine_args import EngineArgs
from rustvllm.layers.linear import Linear

NUM_REQUESTS = 20
VOCAB_SIZE = 97
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "vocab_size": VOCAB_SIZE, "torch_dtype": "float32",
}  # fmt: skip
MODELS = {
    "llama": SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2},
    "gemma3": SIZES
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
    },
    "gpt-neox": SIZES | {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "rotary_pct": 0.5},
}
OPTIONS = {
    "load_format": "dummy", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 96, "block_size": 8,
    "batch_invariant": True, "max_logprobs": -1, "logprobs_mode": "raw_logits",
}  # fmt: skip
WAYS = {
    "recompute": {"num_gpu_blocks_override": 15, "max_num_seqs": 8, "max_num_batched_tokens": 32},
    "swap": {
        "num_gpu_blocks_override": 15, "max_num_seqs": 8, "max_num_batched_tokens": 24, "preemption_mode": "swap",
        "swap_space": 0.01, "enable_prefix_caching": False,
    },
}  # fmt: skip


def workload(seed):
    """Each request's prompt and parameters, the step in which it comes, and for some the one in which it is aborted."""
    rng = random.Random(seed)
    for index in range(NUM_REQUESTS):
        prompt = [rng.randrange(6, VOCAB_SIZE) for _ in range(rng.choice([1, 3, 17, 40]))]
        if index % 3 == 0:
            prompt = list(range(10, 34)) + prompt  # shared
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0]), seed=index, max_tokens=rng.randrange(4, 24),
            stop_token_ids=list(range(10, 40)) if rng.random() < 0.3 else [], ignore_eos=True, detokenize=False,
            logprobs=-1,
        )  # fmt: skip
        comes = rng.randrange(24)
        yield f"r{index}", prompt, params, comes, comes + rng.randrange(1, 9) if index % 5 == 1 else None


def run(engine, requests):
    """Of each request the ids and every logit they were drawn from, and how it ended."""
    answers = {}
    for output in outputs_of(engine, requests, most_steps=2000):
        sample = output.outputs[0]
        logits = [sorted((i, each.logprob) for i, each in place.items()) for place in sample.logprobs]
        answers[output.request_id] = (list(sample.token_ids), logits, sample.finish_reason)
    return answers, engine.engine_core.core.scheduler.stats()


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "int8", "auto"),
        ("llama", "int4-g32", "bfloat16"),
        ("gpt-neox", "int4-g32", "int8_per_token_head"),
        ("gemma3", "int8", "bfloat16"),
    ],
    ids="-".join,
)
def world(request, tmp_path_factory):
    """The arguments of an engine, and what each request gives by itself."""
    family, quantization, kv_cache_dtype = request.param
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODELS[family]))
    arguments = OPTIONS | {"model": str(folder), "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments, num_gpu_blocks_override=100))
    runner = engine.engine_core.core.executor._runner
    model = runner.model
    cache_dtypes = {"auto": torch.float32, "bfloat16": torch.bfloat16, "int8_per_token_head": torch.int8}
    assert {cache.dtype for cache in runner.kv_caches} == {cache_dtypes[kv_cache_dtype]}
    kinds = {module.kernel.packed.kind for module in model.modules() if isinstance(module, Linear)}
    assert kinds == {"w8a8" if quantization == "int8" else "w4a8"}
    assert model.decoder_kernel is not None
    alone = {}
    for request_id, prompt, params, _, _ in [*workload(0), *workload(1)]:
        key = (tuple(prompt), request_id)
        alone[key] = run(engine, [(request_id, prompt, params, 0, None)])[0][request_id]
    engine.shutdown()
    assert len({tuple(ids) for ids, _, _ in alone.values()}) > NUM_REQUESTS, "all the same proves nothing"
    return arguments, alone


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_each_request_is_bit_equal_to_itself_alone(world, way, seed):
    arguments, alone = world
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments, **WAYS[way]))
    requests = list(workload(seed))
    answers, stats = run(engine, requests)
    engine.shutdown()
    assert stats["num_preemptions"] > 0
    assert (stats["num_swapped_in"] > 0) == (way == "swap")
    assert stats["num_free_blocks"] == stats["num_usable_blocks"]
    ended = {answers[request_id][2] for request_id, *_ in requests if request_id in answers}
    assert ended >= {"length", "stop"}
    num_aborted = 0
    for request_id, prompt, _, _, abort_at in requests:
        ids, logits, reason = answers.get(request_id, ([], [], None))
        expected_ids, expected_logits, expected_reason = alone[tuple(prompt), request_id]
        if reason != expected_reason:  # it was aborted: what there was is the same
            assert abort_at is not None
            num_aborted += 1
            assert len(ids) < len(expected_ids)
        assert ids == expected_ids[: len(ids)], request_id
        assert logits == expected_logits[: len(ids)], request_id
        assert reason != expected_reason or len(ids) == len(expected_ids)
    assert num_aborted > 0
