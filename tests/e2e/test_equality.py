"""The whole engine against transformers: 64 prompts together, greedy, float32, every token and every step's logits.

Each step's logits are taken where the runner keeps them and filed under the tokens they follow (as the scheduler knows
them). Afterwards transformers computes the logits along every finished sequence once, and every step must have been
within 1e-4, with the same argmax wherever transformers' first two differ by more than 1e-3.
"""

import gc
import json
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from rustvllm import LLM, SamplingParams
from rustvllm.worker.step_output import ModelRunnerOutput

NUM_PROMPTS = 64
ATOL = 1e-4
MARGIN = 1e-3
LARGEST = pytest.param("gpt2-small-shaped", marks=pytest.mark.slow)


@dataclass
class Case:
    """A checkpoint with its prompts, and transformers' logits for the sequences seen so far."""

    folder: Path
    reference: torch.nn.Module
    prompts: list[list[int]]
    max_tokens: int
    max_model_len: int
    small_pool: int

    def __post_init__(self):
        self._logits = {}

    @torch.no_grad()
    def reference_logits(self, prompt, output):
        """``[len(output), vocab_size]``: transformers' logits at every step that led to ``output``."""
        key = (tuple(prompt), tuple(output))
        if key not in self._logits:
            ids = torch.tensor([prompt + output[:-1]])
            self._logits[key] = self.reference(ids, logits_to_keep=len(output)).logits[0]
        return self._logits[key]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of a busy machine wait for each other: one takes no longer on a quiet one than these tests can bear."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # the worker then leaves torch's threads alone
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(before)


def mixed_prompts(vocab_size, longest, shared, seed=0):
    """64 prompts of mixed lengths; 16 of them begin with the same ``shared`` tokens, and two are equal."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, vocab_size, shared).tolist()
    lengths = rng.integers(1, longest - shared, NUM_PROMPTS)
    prompts = [rng.integers(3, vocab_size, int(length)).tolist() for length in lengths]
    for i in range(0, NUM_PROMPTS, 4):
        prompts[i] = common + prompts[i]
    prompts[-1] = prompts[0]
    assert len({len(p) for p in prompts}) > 20
    return prompts


def transformers_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["embedded", "stories260K", "slm4096-gpt2", LARGEST])
def case(request, tmp_path_factory):
    if request.param == "embedded":
        import rustvllm

        folder = Path(rustvllm.__file__).parent / "assets" / "tiny"
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        yield Case(folder, transformers_model(folder), mixed_prompts(vocab_size, 70, 40), 40, 128, 33)
    elif request.param == "gpt2-small-shaped":
        shared_dir = request.getfixturevalue("shared_dir")
        folder = tmp_path_factory.mktemp("gpt2-small-shaped")
        try:
            reference = gpt2_small_shaped(folder, shared_dir / "data" / "gpt2-tokenizer")
            # Random ids reach the whole vocabulary; few tokens, because this one costs real time.
            yield Case(folder, reference, mixed_prompts(50257, 40, 17), 8, 48, 24)
        finally:
            shutil.rmtree(folder)  # half a gigabyte
    else:
        shared_dir = request.getfixturevalue("shared_dir")
        data = shared_dir / "data" / request.param
        vocab_size = json.loads((data / "hf" / "config.json").read_text())["vocab_size"]
        yield Case(data / "hf", transformers_model(data / "hf"), mixed_prompts(vocab_size, 70, 40), 40, 128, 33)
    gc.collect()


@torch.no_grad()
def gpt2_small_shaped(folder, tokenizer):
    """GPT-2 small with random weights, scaled so that its greedy output is diverse, and the real tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = GPT2LMHeadModel(GPT2Config()).eval()
    model.tie_weights()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "wte" in name or "wpe" in name:
            parameter.normal_(std=0.05)
        elif parameter.dim() == 2:
            parameter.normal_(std=1.5 * parameter.shape[0] ** -0.5)
        else:
            parameter.normal_(std=0.05).add_(1.0 if name.endswith("weight") else 0.0)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return model


class Recorder:
    """Files the logits of every step under the tokens that they follow."""

    def __init__(self, llm, monkeypatch):
        self.core = llm.llm_engine.engine_core.core
        self.logits = defaultdict(list)
        self.steps = []
        runner = self.core.executor._runner
        execute = runner.execute_model

        def execute_and_record(output):
            execute(output)
            self.steps.append((output.num_reqs, output.total_num_scheduled_tokens))
            executed = runner._executed
            for i, row in enumerate(executed.rows.tolist()):
                self.logits[tuple(self.core.scheduler.token_ids(row))].append(executed.logits[i].clone())

        monkeypatch.setattr(runner, "execute_model", execute_and_record)


CONFIGURATIONS = {
    "default": {},
    "budget-64": {"max_num_batched_tokens": 64},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "small-pool": {"num_gpu_blocks_override": ...},
    "small-pool-no-prefix-cache-budget-64": {
        "num_gpu_blocks_override": ...,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 64,
    },
}


@pytest.mark.timeout(300)  # the largest takes some ten seconds on an idle core, and minutes on a busy one
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_64_prompts_together_equal_transformers(case, configuration, monkeypatch):
    options = dict(CONFIGURATIONS[configuration])
    if "num_gpu_blocks_override" in options:
        options["num_gpu_blocks_override"] = case.small_pool
    llm = LLM(
        str(case.folder),
        dtype="float32",
        device="cpu",
        max_model_len=case.max_model_len,
        max_num_seqs=NUM_PROMPTS,
        skip_tokenizer_init=True,
        **options,
    )
    recorder = Recorder(llm, monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=case.max_tokens, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": p} for p in case.prompts], params, use_tqdm=False)
    stats = recorder.core.scheduler.stats()
    llm.llm_engine.engine_core.shutdown()

    assert [r.prompt_token_ids for r in results] == case.prompts
    outputs = [list(r.outputs[0].token_ids) for r in results]
    assert all(len(output) == case.max_tokens for output in outputs)
    assert_diverse(outputs)
    compared, clear = compare(case, outputs, recorder.logits)
    assert compared >= NUM_PROMPTS * case.max_tokens
    assert clear > 0.95 * compared

    pool_is_small = "num_gpu_blocks_override" in options
    assert (stats["num_preemptions"] > 0) == pool_is_small
    assert (stats["prefix_cache_hits"] > 0) == options.get("enable_prefix_caching", True)
    budget = options.get("max_num_batched_tokens")
    if budget:
        assert max(num_tokens for _, num_tokens in recorder.steps) <= budget
    elif not pool_is_small:
        assert max(num_reqs for num_reqs, _ in recorder.steps) == NUM_PROMPTS, "all run together"


def assert_diverse(outputs):
    """Output that repeats one token proves nothing."""
    assert len({tuple(output) for output in outputs}) > NUM_PROMPTS / 2
    assert len({token for output in outputs for token in output}) >= 25
    assert np.mean([len(set(output)) / len(output) for output in outputs]) > 0.3


def compare(case, outputs, recorded):
    """Every recorded step of every sequence against transformers; how many there were, and with a clear margin."""
    compared = clear = 0
    for prompt, output in zip(case.prompts, outputs, strict=True):
        expected = case.reference_logits(prompt, output)
        top = expected.topk(2)
        for i, token in enumerate(output):
            steps = recorded[tuple(prompt + output[:i])]
            assert steps, "this step's logits were not seen"
            for logits in steps:
                torch.testing.assert_close(logits, expected[i], atol=ATOL, rtol=0)
                compared += 1
                if top.values[i, 0] - top.values[i, 1] > MARGIN:
                    clear += 1
                    assert token == int(top.indices[i, 0])
    return compared, clear


@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [{}, {"num_gpu_blocks_override": 33, "max_num_batched_tokens": 64}])
def test_overlapping_steps_change_no_token(case, options, monkeypatch):
    """The next step is launched while the host does not know what the last one sampled: the runner does."""
    if case.max_model_len != 128:
        pytest.skip("one small checkpoint of each architecture is enough")
    monkeypatch.setattr(ModelRunnerOutput, "is_done", lambda _: False)  # else the CPU has nothing to overlap
    results = {}
    for overlap in (False, True):
        llm = LLM(
            str(case.folder),
            dtype="float32",
            device="cpu",
            max_model_len=case.max_model_len,
            max_num_seqs=NUM_PROMPTS,
            skip_tokenizer_init=True,
            async_scheduling=overlap,
            **options,
        )
        assert llm.llm_engine.engine_core.core.max_concurrent_batches == 1 + overlap
        kinds = [
            SamplingParams(temperature=0.0, max_tokens=case.max_tokens, ignore_eos=True, detokenize=False),
            SamplingParams(temperature=0.0, max_tokens=20, frequency_penalty=0.5, ignore_eos=True, detokenize=False),
            SamplingParams(temperature=0.8, seed=7, max_tokens=20, top_p=0.9, ignore_eos=True, detokenize=False),
            SamplingParams(temperature=1.0, seed=8, max_tokens=9, min_tokens=4, detokenize=False),
        ]
        params = [kinds[index % len(kinds)] for index in range(NUM_PROMPTS)]
        outputs = llm.generate([{"prompt_token_ids": p} for p in case.prompts], params, use_tqdm=False)
        stats = llm.llm_engine.engine_core.core.scheduler.stats()
        assert (stats["num_preemptions"] > 0) == ("num_gpu_blocks_override" in options)
        llm.llm_engine.engine_core.shutdown()
        results[overlap] = [list(output.outputs[0].token_ids) for output in outputs]
    differ = [index for index in range(NUM_PROMPTS) if results[False][index] != results[True][index]]
    for index in differ:  # batches of another size round otherwise: only where the choice is that close
        assert index % len(kinds) == 0, "a token that was not the greedy one"
        reference = case.reference_logits(case.prompts[index], results[True][index])
        top = reference.topk(2)
        for step, token in enumerate(results[True][index]):
            if top.values[step, 0] - top.values[step, 1] > MARGIN:
                assert token == int(top.indices[step, 0])
    assert len(differ) <= 2


def test_golden_ids_through_the_front_end(shared_dir):
    """Text in, ids out, as transformers gave them when the checkpoints were published."""
    for name in ("stories260K", "slm4096-gpt2"):
        data = shared_dir / "data" / name
        cases = json.loads((data / "golden.json").read_text())["cases"]
        llm = LLM(str(data / "hf"), dtype="float32", device="cpu")
        for golden in cases:
            params = SamplingParams(temperature=0.0, max_tokens=len(golden["greedy_ids"]), ignore_eos=True)
            (result,) = llm.generate([{"prompt_token_ids": golden["prompt_ids"]}], params, use_tqdm=False)
            assert result.outputs[0].token_ids == golden["greedy_ids"]
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def gpt2_dummy(shared_dir, tmp_path):
    """A small GPT-2 without weights, with the real tokenizer: `load_format="dummy"` fills it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared_dir / "data" / "gpt2-tokenizer" / name, tmp_path / name)
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
        "n_embd": 64, "n_layer": 2, "n_head": 4, "eos_token_id": 50256, "bos_token_id": 50256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_prompt_of_five_tokens_is_scheduled_as_five_then_one_by_one(gpt2_dummy, monkeypatch):
    llm = LLM(str(gpt2_dummy), load_format="dummy", device="cpu", max_model_len=256)
    recorder = Recorder(llm, monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (result,) = llm.generate("Hello, my name is", params, use_tqdm=False)
    assert len(result.prompt_token_ids) == 5
    assert [num_tokens for _, num_tokens in recorder.steps] == [5, 1, 1, 1, 1, 1]
    # num_tokens after step i: what the next step's logits follow.
    assert sorted(len(tokens) for tokens in recorder.logits) == [5, 6, 7, 8, 9, 10]
    assert llm.get_tokenizer().encode("Hello") == [15496]
    first, second = llm.generate(["Hello", "Goodbye"], params, use_tqdm=False)
    assert (first.prompt, second.prompt) == ("Hello", "Goodbye")
    assert first.prompt_token_ids == [15496]
    alone = llm.generate("Goodbye", params, use_tqdm=False)[0]
    assert alone.outputs[0].token_ids == second.outputs[0].token_ids
    llm.llm_engine.engine_core.shutdown()


def test_dummy_weights_depend_on_the_seed_alone_and_are_diverse(gpt2_dummy):
    outputs = []
    for seed in (0, 0, 1):
        llm = LLM(str(gpt2_dummy), load_format="dummy", device="cpu", max_model_len=256, seed=seed)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": [i]} for i in range(64)], params, use_tqdm=False)
        outputs.append([r.outputs[0].token_ids for r in results])
        llm.llm_engine.engine_core.shutdown()
    assert outputs[0] == outputs[1] != outputs[2]
    assert_diverse(outputs[0])
