"""Adapters against peft: logits and greedy ids, alone and mixed, however the steps are cut."""

import asyncio
import copy
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from rustvllm import LLM, SamplingParams
from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.engine.async_llm import AsyncLLM
from rustvllm.exceptions import ConfigError, InvalidRequestError, ModelLoadError
from rustvllm.lora.modules import adaptable_parts, full_names
from rustvllm.lora.request import LoRARequest

pytest.importorskip("peft", reason="peft is not installed")
from checkpoints import make, prompts
from peft_adapters import KINDS, logits, make_adapter, options_of, with_adapter

PLAIN = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "granite", "olmo2", "olmo3",
    "gpt-neox", "opt",
)  # fmt: skip
FAMILIES = {
    **{kind: (kind, {}) for kind in PLAIN},
    "opt-post-norm-projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "phi3": ("phi3", {"num_key_value_heads": 4}),
}
LENGTH = 12
PROMPTS = prompts(97, [3, 5, 8, 13, 17, 24, 30, 33, 37, 41])
DORA = 3
OPTIONS = {
    "skip_tokenizer_init": True, "enable_lora": True, "max_loras": 4, "num_gpu_blocks_override": 200,
    "max_model_len": 96, "max_logprobs": -1, "logprobs_mode": "raw_logits", "dtype": "float32",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, detokenize=False)
ALL_LOGITS = SamplingParams(temperature=0, max_tokens=LENGTH, detokenize=False, logprobs=-1)


def token_prompts(lists):
    return [{"prompt_token_ids": ids} for ids in lists]


def run(llm, adapters=None, params=GREEDY, lists=PROMPTS):
    """The samples of the prompts, each with its adapter."""
    outputs = llm.generate(token_prompts(lists), params, use_tqdm=False, lora_request=adapters)
    asked = adapters if isinstance(adapters, list) else [adapters] * len(outputs)
    assert [output.lora_request for output in outputs] == list(asked)
    return [output.outputs[0] for output in outputs]


def ids_of(samples):
    return [sample.token_ids for sample in samples]


def share_that_differs(some, others):
    return np.mean([one != other for one, other in zip(some, others, strict=True)])


def assert_equals_peft(reference, samples, lists=PROMPTS):
    """Every logit within 1e-4, and the id of the largest wherever the second is 1e-3 away."""
    num_clear = 0
    for prompt, sample in zip(lists, samples, strict=True):
        expected = logits(reference, [*prompt, *sample.token_ids[:-1]])[len(prompt) - 1 :]
        actual = torch.tensor([[place[i].logprob for i in range(expected.shape[1])] for place in sample.logprobs])
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
        best = expected.topk(2).values
        clear = best[:, 0] - best[:, 1] > 1e-3
        chosen = torch.tensor(sample.token_ids)
        assert torch.equal(chosen[clear], expected.argmax(-1)[clear])
        num_clear += int(clear.sum())
    assert num_clear > 0.9 * LENGTH * len(lists), "margins too small to say anything"


def slow_but(quick, names):
    """All names as parameters, of which every ``make test`` runs some alone."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=slow_but(("gpt2", "llama", "gemma3", "opt-post-norm-projected"), FAMILIES))
def family(request, tmp_path_factory):
    """Its name, transformers' model, the folder of the checkpoint, and an engine."""
    reference = make(*FAMILIES[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    with LLM(str(folder), **OPTIONS) as llm:
        yield FAMILIES[request.param][0], reference, llm


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_ids_equal_pefts(family, kind, tmp_path):
    architecture, reference, llm = family
    make_adapter(reference, tmp_path, seed=KINDS.index(kind) + 1, **options_of(kind, architecture))
    adapter = LoRARequest(kind, KINDS.index(kind) + 1, str(tmp_path))
    samples, alone = run(llm, adapter, ALL_LOGITS), run(llm)
    assert share_that_differs(ids_of(samples), ids_of(alone)) >= 0.9, "the adapter changes too little to be seen"
    with with_adapter(reference, tmp_path) as adapted:
        assert_equals_peft(adapted, samples)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A Llama whose products the core computes, and three adapters of different ranks, one of them with magnitudes."""
    reference = make("llama", {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2})
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    requests = []
    for number, rank in enumerate((2, 4, 16), 1):
        path = tmp_path_factory.mktemp(f"adapter-{number}")
        make_adapter(
            reference, path, seed=number, r=rank, lora_alpha=rank, target_modules="all-linear", use_dora=number == DORA
        )
        requests.append(LoRARequest(f"adapter-{number}", number, str(path)))
    return folder, requests, reference


@pytest.fixture(scope="module")
def eight(world, tmp_path_factory):
    """The world's adapters and five more, the last of them with magnitudes as well."""
    _, requests, reference = world
    more = []
    for number, rank in enumerate((1, 3, 8, 13, 16), 4):
        path = tmp_path_factory.mktemp(f"adapter-{number}")
        make_adapter(
            reference, path, seed=number, r=rank, lora_alpha=rank, target_modules="all-linear", use_dora=number == 8
        )
        more.append(LoRARequest(f"adapter-{number}", number, str(path)))
    return [*requests, *more]


def mixture(requests, size=20):
    """Prompts with each adapter and without, neighbours with different ones."""
    choices = [*requests, None]
    count = len(choices)
    adapters = [choices[(index + index // count) % count] for index in range(size)]
    return adapters, [PROMPTS[index % 10] for index in range(size)]


WAYS = {
    "together": {},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 12},
    "preempted": {"num_gpu_blocks_override": 14, "max_num_seqs": 12, "max_model_len": 80},
    "swapped": {
        "num_gpu_blocks_override": 14, "max_num_seqs": 12, "max_model_len": 80, "preemption_mode": "swap",
        "swap_space": 0.01,
    },
    "overlapping": {"async_scheduling": True},
    "one adapter at a time": {"max_loras": 1},
    "drafts": {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2,
            "adaptive": False,
        }
    },
}  # fmt: skip


def exact(samples):
    """Ids, and the logits of each place, to be compared bit for bit."""
    return [
        (sample.token_ids, [sorted((i, each.logprob) for i, each in place.items()) for place in sample.logprobs])
        for sample in samples
    ]


@pytest.fixture(scope="module", params=slow_but(("float32",), ("float32", "bfloat16", "int8")))
def alone(request, world, eight):
    """Each request of the mixture by itself, with ``batch_invariant``."""
    folder, _, _ = world
    options = {"batch_invariant": True} | (
        {"quantization": "int8"} if request.param == "int8" else {"dtype": request.param}
    )
    adapters, lists = mixture(eight, 27)
    with LLM(str(folder), **(OPTIONS | options)) as llm:
        samples = [run(llm, adapter, ALL_LOGITS, [ids])[0] for adapter, ids in zip(adapters, lists, strict=True)]
    return options, exact(samples)


@pytest.mark.parametrize("way", list(WAYS))
def test_eight_adapters_and_the_model_mixed_are_bit_equal_to_each_alone(world, eight, alone, way):
    options, expected = alone
    adapters, lists = mixture(eight, 27)
    with LLM(str(world[0]), **(OPTIONS | {"max_loras": 8} | options | WAYS[way])) as llm:
        store, together = llm.llm_engine.engine_core.core.executor._runner.adapters, []
        inner = store.begin_step
        store.begin_step = lambda adapters, *rest: together.append(len({*adapters.tolist()})) or inner(adapters, *rest)
        actual = exact(run(llm, adapters, ALL_LOGITS, lists))
        stats = llm.llm_engine.engine_core.handle.stats()
    assert actual == expected
    most = {"one adapter at a time": 2, "preempted": 3, "swapped": 3}
    assert max(together) >= most.get(way, 9), "all were in one step"
    if way in ("preempted", "swapped"):
        assert stats["num_preemptions"] > 0
    if way == "drafts":
        assert stats["num_accepted_tokens"] > 0


@pytest.mark.parametrize("decoder", ["core", "modules"])
def test_without_batch_invariance_logits_are_pefts_in_one_call_and_module_by_module(world, decoder, monkeypatch):
    folder, requests, reference = world
    adapters, lists = mixture(requests)
    monkeypatch.setenv("RUSTVLLM_DECODER", decoder)
    with LLM(str(folder), **OPTIONS) as llm:
        runner = llm.llm_engine.engine_core.core.executor._runner
        takes = []
        if decoder == "modules":
            assert runner.model.decoder_kernel is None
        else:
            inner = runner.model.decoder_kernel.takes
            runner.model.decoder_kernel.takes = lambda *arguments: takes.append(inner(*arguments)) or takes[-1]
        samples = run(llm, adapters, ALL_LOGITS, lists)
        assert all(takes), "the one call is used with adapters, too"
        assert len(takes) >= (LENGTH if decoder == "core" else 0)
    for request in requests:
        mine = [index for index, adapter in enumerate(adapters) if adapter == request]
        with with_adapter(reference, request.lora_path) as adapted:
            assert_equals_peft(adapted, [samples[i] for i in mine], [lists[i] for i in mine])


@pytest.mark.parametrize(
    ("targets", "is_one_call"), [(["query_key_value", "dense"], True), (["dense", "dense_h_to_4h"], False)]
)
def test_blocks_side_by_side_have_adapters_in_one_call_unless_an_activation_follows(targets, is_one_call, tmp_path):
    reference = make("gpt-neox", {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2})
    reference.save_pretrained(tmp_path / "model")
    make_adapter(reference, tmp_path / "adapter", seed=1, r=4, lora_alpha=4, target_modules=targets)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        kernel = llm.llm_engine.engine_core.core.executor._runner.model.decoder_kernel
        inner, takes = kernel.takes, []
        kernel.takes = lambda *arguments: takes.append(inner(*arguments)) or takes[-1]
        adapted, base = run(llm, adapter, ALL_LOGITS), run(llm, None, ALL_LOGITS)
    assert share_that_differs(ids_of(adapted), ids_of(base)) >= 0.9, "the adapter changes too little to be seen"
    assert len(takes) >= 2 * LENGTH
    assert takes[: len(takes) // 2] == [is_one_call] * (len(takes) // 2)
    assert all(takes[-LENGTH:]), "steps without adapters are one call"
    assert_equals_peft(reference, base)
    with with_adapter(reference, tmp_path / "adapter") as with_products:
        assert_equals_peft(with_products, adapted)


def test_int8_weights_with_an_adapter_stay_close_to_the_same_without_rounding(world):
    folder, requests, _ = world
    with LLM(str(folder), **OPTIONS) as llm:
        exact_logits = run(llm, requests[0], ALL_LOGITS)
    with LLM(str(folder), **(OPTIONS | {"quantization": "int8"})) as llm:
        rounded, base = run(llm, requests[0], ALL_LOGITS), run(llm, None, ALL_LOGITS)

    def first(samples):
        return torch.tensor([[sample.logprobs[0][i].logprob for i in range(97)] for sample in samples])

    distance = (first(rounded) - first(exact_logits)).norm()
    assert distance < 0.2 * (first(base) - first(exact_logits)).norm()


def test_adapters_are_kept_in_16_bits_over_weights_of_8_unless_they_are_to_be_exact(world, monkeypatch):
    folder, requests, _ = world
    monkeypatch.setenv("RUSTVLLM_ACTIVATIONS", "float")
    sizes, logits_of = {}, {}
    for quantization, lora_dtype in ((None, "auto"), (None, "bfloat16"), ("int8", "auto"), ("int8", "float32")):
        options = OPTIONS | {"quantization": quantization, "lora_dtype": lora_dtype}
        with LLM(str(folder), **options) as llm:
            samples = run(llm, requests[1], ALL_LOGITS, PROMPTS[:3])
            store = llm.llm_engine.engine_core.core.executor._runner.adapters
            [number] = store.lora_ranks
            found = [layer.deltas[number].nbytes for layer in store._layers.values()]
        sizes[quantization, lora_dtype] = sum(found)
        logits_of[quantization, lora_dtype] = torch.tensor(
            [[sample.logprobs[0][i].logprob for i in range(97)] for sample in samples]
        )
    assert sizes[None, "auto"] == sizes["int8", "float32"] == 2 * sizes["int8", "auto"] == 2 * sizes[None, "bfloat16"]
    for quantization, exact, rounded in ((None, "auto", "bfloat16"), ("int8", "float32", "auto")):
        of_adapter = (logits_of[quantization, exact] - logits_of[quantization, rounded]).norm()
        of_weights = (logits_of["int8", "float32"] - logits_of[None, "auto"]).norm()
        assert 0 < of_adapter < of_weights, "16 bits change less than the weights' 8 do"


@pytest.mark.parametrize("quantization", ["int8", "int4-g32"])
def test_magnitudes_of_a_quantised_base_are_those_of_its_rounded_weights(world, quantization, monkeypatch):
    folder, requests, reference = world
    monkeypatch.setenv("RUSTVLLM_ACTIVATIONS", "float")
    adapter, rounded = requests[DORA - 1], copy.deepcopy(reference)
    with LLM(str(folder), **(OPTIONS | {"quantization": quantization, "lora_dtype": "float32"})) as llm:
        samples, base = run(llm, adapter, ALL_LOGITS), run(llm, None, ALL_LOGITS)
        model = llm.llm_engine.engine_core.core.executor._runner.model
        parts = adaptable_parts(model)
        for full, name in full_names(model, parts).items():
            part, weight = parts[name], rounded.get_submodule(full).weight
            weight.data = part.linear.weight_rows(part.num_outputs, part.first)
        rounded.lm_head.weight.data = model.lm_head.weight_rows(97)
    assert not torch.equal(rounded.lm_head.weight, reference.lm_head.weight)
    assert share_that_differs(ids_of(samples), ids_of(base)) >= 0.9, "the adapter changes too little to be seen"
    with with_adapter(rounded, adapter.lora_path) as adapted:
        assert_equals_peft(adapted, samples)


def test_an_output_whose_weights_are_all_zero_has_no_direction_for_a_magnitude(tmp_path):
    reference = make("llama", {})
    reference.model.layers[1].self_attn.v_proj.weight.data[5] = 0
    reference.save_pretrained(tmp_path / "model")
    make_adapter(reference, tmp_path / "adapter", seed=1, target_modules=["v_proj"], use_dora=True)
    edit_tensors(tmp_path / "adapter", without_output(5))
    message = "output 5 of model.layers.1.self_attn.v_proj has weights of length 0 with the adapter"
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(tmp_path / "model"), lora_modules=[f"a={tmp_path / 'adapter'}"], **OPTIONS)


def test_no_cached_block_is_shared_between_adapters_or_with_what_was_loaded_before(world, tmp_path):
    folder, requests, reference = world
    prompt = prompts(97, [48], seed=9)
    path = shutil.copytree(requests[0].lora_path, tmp_path / "adapter")
    own = LoRARequest("own", 7, str(path))
    with LLM(str(folder), **OPTIONS) as llm:

        def cached(adapter):
            [output] = llm.generate(token_prompts(prompt), GREEDY, use_tqdm=False, lora_request=adapter)
            return output.num_cached_tokens, output.outputs[0].token_ids

        first = [cached(adapter) for adapter in (None, *requests, own)]
        assert [count for count, _ in first] == [0] * 5
        again = [cached(adapter) for adapter in (None, *requests, own)]
        assert [count for count, _ in again] == [32] * 5
        assert [ids for _, ids in again] == [ids for _, ids in first]
        assert first[1][1] == first[4][1]
        make_adapter(reference, path, seed=77, r=4, target_modules="all-linear")
        assert cached(own) == again[4], "what is loaded stays until its reload is asked for"
        reloaded = cached(dataclasses.replace(own, load_inplace=True))
        assert reloaded[0] == 0
        assert reloaded[1] != first[4][1]
        assert cached(own) == (32, reloaded[1])


def test_adapters_come_and_go(world):
    folder, requests, _ = world
    with LLM(str(folder), **(OPTIONS | {"max_loras": 1, "max_cpu_loras": 2})) as llm:
        engine = llm.llm_engine
        expected = [ids_of(run(llm, request)) for request in requests]
        assert engine.list_loras() == {2, 3}, "the least recently used made room"
        assert ids_of(run(llm, requests[0])) == expected[0]
        assert engine.list_loras() == {1, 3}
        with pytest.raises(InvalidRequestError, match="max_cpu_loras is 2"):
            run(llm, [requests[index % 3] for index in range(10)])
        # Removed while it is under way: its request ends on it, and only then is it gone.
        engine.add_request("r", {"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=requests[0])
        engine.step()
        assert engine.remove_lora(1)
        assert not engine.remove_lora(1)
        store = engine.engine_core.core.executor._runner.adapters
        assert len(store) == 2
        finished = [output for _ in range(LENGTH + 2) for output in engine.step() if output.finished]
        assert finished[0].outputs[0].token_ids == expected[0][0]
        assert finished[0].lora_request == requests[0]
        assert engine.add_lora(requests[2])
        assert len(store) == 2
        assert engine.list_loras() == {2, 3}


@pytest.mark.parametrize("multiprocess", [False, True])
def test_an_engine_that_runs_by_itself(world, multiprocess):
    folder, requests, _ = world
    with LLM(str(folder), **OPTIONS) as llm:
        expected = [ids_of(run(llm, request)) for request in requests]

    async def tokens(engine, adapter, index, name):
        async for output in engine.generate({"prompt_token_ids": PROMPTS[index]}, GREEDY, name, lora_request=adapter):
            last = output
        assert last.lora_request == adapter
        return last.outputs[0].token_ids

    async def everything():
        modules = [f"adapter-1={requests[0].lora_path}"]
        config = AsyncEngineArgs(model=str(folder), lora_modules=modules, **OPTIONS).create_engine_config()
        engine = await asyncio.to_thread(AsyncLLM, config, multiprocess=multiprocess)
        try:
            assert await engine.list_loras() == {1}
            got = await asyncio.gather(
                *(tokens(engine, requests[i % 3], i // 3, str(i)) for i in range(9)),
            )
            assert got == [expected[i % 3][i // 3] for i in range(9)]
            assert await engine.list_loras() == {1, 2, 3}
            assert await engine.remove_lora(2)
            assert await engine.list_loras() == {1, 3}
            assert await tokens(engine, requests[1], 0, "again") == expected[1][0]
            with pytest.raises(InvalidRequestError, match="no folder"):
                await tokens(engine, LoRARequest("x", 9, "/no/such"), 0, "x")
        finally:
            engine.shutdown()

    asyncio.run(everything())


def edit_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, change):
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def with_nan(tensors):
    tensors[next(key for key in tensors if "lora_B" in key)][0, 0] = float("nan")


def without_b(tensors):
    for key in [key for key in tensors if "lora_B" in key][::2]:
        del tensors[key]


def without_a_layer(tensors):
    for key in [key for key in tensors if ".layers.1." in key]:
        del tensors[key]


def of_other_width(tensors):
    for key, tensor in tensors.items():
        tensors[key] = torch.zeros(tensor.shape[0], 8) if "lora_A" in key else tensor


def of_other_rank(tensors):
    for key, tensor in tensors.items():
        tensors[key] = (torch.cat([tensor] * 2, 0) if "lora_A" in key else torch.cat([tensor] * 2, 1)).contiguous()


def without_output(output):
    def change(tensors):
        for key in [key for key in tensors if "lora_B" in key]:
            tensors[key][output] = 0

    return change


def with_magnitudes(folder, change=lambda magnitudes: None):
    """Make it an adapter with magnitudes of 1, but for what ``change`` does to the first."""

    def add(tensors):
        for key in [key for key in tensors if "lora_B" in key]:
            tensors[key.replace("lora_B.weight", MAGNITUDES)] = torch.ones(tensors[key].shape[0])
        key = next(key for key in tensors if MAGNITUDES in key)
        changed = change(tensors[key])
        if changed is not None:
            tensors[key] = changed

    edit_tensors(folder, add)
    edit_config(folder, use_dora=True)


def named(name):
    def change(tensors):
        tensors[name] = torch.zeros(4, 4)

    return change


MAGNITUDES = "lora_magnitude_vector"
WRONG = {
    "no folder": (shutil.rmtree, "there is no folder"),
    "no configuration": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no tensors": (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "a pickle": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), "a pickle can run code",
    ),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "cannot be read"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "must hold an object"),
    "half a file": (
        lambda f: (f / "adapter_model.safetensors").write_bytes((f / "adapter_model.safetensors").read_bytes()[:-99]),
        "not a complete safetensors file",
    ),
    "rank": (lambda f: edit_config(f, r=64), r"LoRA rank 64 \(r\) is greater than max_lora_rank 16"),
    "rank of a pattern": (lambda f: edit_config(f, rank_pattern={"q_proj": 17}), "LoRA rank 17"),
    "an expression that takes for ever": (
        lambda f: edit_config(f, rank_pattern={"(([a-z_.0-9]+)+)+!": 8}), "exceed the limit of 2 seconds and 512 MiB",
    ),
    "a scale that is too large": (lambda f: edit_config(f, lora_alpha=1e300), r"scale .*lora_alpha and r.* float32"),
    "no rank": (lambda f: edit_config(f, r=None), "r must be a whole number"),
    "another rank": (lambda f: edit_tensors(f, of_other_rank), "has rank 8, but adapter_config.json says 4"),
    "no magnitudes": (lambda f: edit_config(f, use_dora=True), "has lora_A but no lora_magnitude_vector"),
    "magnitudes without use_dora": (
        lambda f: (with_magnitudes(f), edit_config(f, use_dora=False)), "without which magnitudes mean nothing",
    ),
    "a magnitude that is not finite": (
        lambda f: with_magnitudes(f, lambda m: m.mul_(float("nan"))), "lora_magnitude_vector of .* not finite",
    ),
    "too few magnitudes": (lambda f: with_magnitudes(f, lambda m: m[1:].clone()), r"magnitudes of .* are \(\d+,\)"),
    "use_dora": (lambda f: edit_config(f, use_dora="yes"), "use_dora must be true or false"),
    "biases": (lambda f: edit_config(f, bias="all"), "bias is 'all'"),
    "whole modules": (lambda f: edit_config(f, modules_to_save=["lm_head"]), "modules_to_save"),
    "biases of the matrices": (lambda f: edit_config(f, lora_bias=True), "lora_bias is True .* not supported"),
    "one for some tokens alone (aLoRA)": (
        lambda f: edit_config(f, alora_invocation_tokens=[5, 6]), r"alora_invocation_tokens .* not supported",
    ),
    "layers that are there twice": (
        lambda f: edit_config(f, layer_replication=[[0, 2], [1, 2]]), "layer_replication is .* not supported",
    ),
    "another method": (lambda f: edit_config(f, peft_type="IA3"), "only supports LORA"),
    "a start that changes the base": (lambda f: edit_config(f, init_lora_weights="pissa_niter_4"), "pissa"),
    "a bad expression": (lambda f: edit_config(f, target_modules="("), "invalid regular expression"),
    "a number that is none": (lambda f: edit_tensors(f, with_nan), "not finite"),
    "half of the tensors": (lambda f: edit_tensors(f, without_b), "but no lora_B"),
    "a layer is missing": (lambda f: edit_tensors(f, without_a_layer), "7 of them have no tensors"),
    "another model": (lambda f: edit_tensors(f, of_other_width), "the adapter belongs to another model"),
    "the head": (
        lambda f: edit_tensors(
            f, lambda t: [named(f"base_model.model.lm_head.lora_{k}.weight")(t) for k in "AB"]
        ),
        "embeddings and heads cannot be adapted",
    ),
    "an embedding": (
        lambda f: edit_tensors(f, named("base_model.model.model.embed_tokens.lora_embedding_A")), "embedding",
    ),
    "an unknown tensor": (lambda f: edit_tensors(f, named("surprise")), "none of lora_A and lora_B"),
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(world):
    with LLM(str(world[0]), **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("case", list(WRONG))
def test_what_is_wrong_is_said_before_anything_changes(world, llm, case, tmp_path):
    break_it, message = WRONG[case]
    folder = shutil.copytree(world[1][1].lora_path, tmp_path / "adapter")
    break_it(folder)
    before = llm.llm_engine.list_loras()
    with pytest.raises(InvalidRequestError, match=message):
        run(llm, LoRARequest("wrong", 99, str(folder)))
    assert llm.llm_engine.list_loras() == before
    assert len(run(llm)) == len(PROMPTS)
    if case not in ("no folder", "rank", "half of the tensors"):  # each is a start of an engine
        return
    with pytest.raises((ConfigError, ModelLoadError), match=message):
        LLM(str(world[0]), lora_modules=[f"wrong={folder}"], **OPTIONS)


@pytest.mark.parametrize("name", ["", "../x", "a/../b", "/a", "a=b", " a", "a\n", "x" * 300, 7])
def test_names_that_are_none(name):
    with pytest.raises(InvalidRequestError, match="an adapter's name"):
        LoRARequest(name, 1, "/x")


def test_requests_that_contradict_what_is_loaded(world, llm):
    _, requests, _ = world
    run(llm, requests[0])
    path = requests[1].lora_path
    model_name = llm.llm_engine.config.model.served_model_name[0]
    for request, message in (
        (LoRARequest("other", 1, path), "lora_int_id 1"),
        (LoRARequest("adapter-1", 1, path), "load_inplace=True"),
        (LoRARequest(model_name.strip("/"), 5, path), None),
        (LoRARequest("without-a-path", 6), "has no lora_path"),
    ):
        if message is not None:
            with pytest.raises(InvalidRequestError, match=message):
                run(llm, request)
    for wrong, message in (
        ("adapter", "LoRARequest"), ([None] * 3, "3 entries for 10 prompts"), (["x"] * 10, "one of str"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=message):
            run(llm, wrong)
    assert LoRARequest("a b/ü", 3, "x") == LoRARequest("a b/ü", 4, "y")


def test_engines_that_serve_none_say_so(world):
    folder, requests, _ = world
    with (
        LLM(str(folder), **(OPTIONS | {"enable_lora": False})) as llm,
        pytest.raises(InvalidRequestError, match="need enable_lora=True"),
    ):
        run(llm, requests[0])
    for options, message in (
        ({"model_impl": "transformers"}, "transformers' modelling code"),
        ({"max_cpu_loras": 3}, r"max_cpu_loras \(3\) must be >= max_loras \(4\)"),
        ({"lora_dtype": "float16"}, "lora_dtype must be one of auto, float32, bfloat16, got 'float16'"),
        ({"max_loras": 0}, "max_loras must be an integer between 1"),
        ({"enable_lora": False, "lora_modules": ["a=b"]}, "lora_modules needs enable_lora"),
        ({"lora_modules": ["a"]}, "expected name=path"),
        ({"lora_modules": ['{"name": "a"}']}, "must have name and path"),
        ({"lora_modules": [f"a={requests[0].lora_path}"] * 2}, "names 'a' twice"),
        (
            {"lora_modules": [f"base={requests[0].lora_path}"], "served_model_name": "base"},
            "has the same name as the served model",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(folder), **(OPTIONS | options))
