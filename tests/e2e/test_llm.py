"""``LLM`` with real weights: the steps of a request, golden texts, and what must never change an answer."""

import gc
import json
import os
import subprocess
import sys

import pytest

from rustvllm import LLM, SamplingParams
from rustvllm.exceptions import InvalidRequestError, ModelLoadError, RequestFailedError

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def stories_dir(shared_dir):
    return shared_dir / "data/stories260K"


@pytest.fixture(scope="module")
def golden(stories_dir):
    return json.loads((stories_dir / "golden.json").read_text())["cases"]


@pytest.fixture(scope="module")
def stories(stories_dir):
    with LLM(str(stories_dir / "hf"), num_gpu_blocks_override=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def gpt2_dir(tmp_path_factory):
    """GPT-2's vocabulary over a narrow body: seeded random weights, so no download."""
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 256,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "eos_token_id": 50256,
    }
    folder = tmp_path_factory.mktemp("gpt2-narrow")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def gpt2(gpt2_dir, shared_dir):
    tokenizer = str(shared_dir / "data/gpt2-tokenizer")
    with LLM(str(gpt2_dir), tokenizer=tokenizer, load_format="dummy", num_gpu_blocks_override=256) as llm:
        yield llm


def run(llm, prompts, params=GREEDY, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def record_steps(llm, monkeypatch):
    """Scheduled tokens of every step from here on."""
    executor = llm.llm_engine.engine_core.core.executor
    steps = []
    execute = executor.execute_model

    def recording(output):
        steps.append(output.total_num_scheduled_tokens)
        execute(output)

    monkeypatch.setattr(executor, "execute_model", recording)
    return steps


def test_five_tokens_and_then_one_a_step(gpt2, monkeypatch):
    tokenizer = gpt2.llm_engine.get_tokenizer()
    assert tokenizer.encode("Hello") == [15496]
    assert len(tokenizer.encode("Hello, my name is")) == 5
    steps = record_steps(gpt2, monkeypatch)
    engine, num_tokens = gpt2.llm_engine, []
    engine.add_request("r", "Hello, my name is", GREEDY.clone(ignore_eos=True, max_tokens=6))
    while engine.has_unfinished_requests():
        num_tokens += [len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in engine.step()]
    assert steps == [5, 1, 1, 1, 1, 1]
    assert num_tokens == [6, 7, 8, 9, 10, 11]


def test_results_in_order(gpt2):
    hello, goodbye = run(gpt2, ["Hello", "Goodbye"])
    assert (hello.prompt, hello.prompt_token_ids) == ("Hello", [15496])
    assert goodbye.prompt == "Goodbye"
    assert ids(run(gpt2, ["Goodbye", "Hello"])) == ids([goodbye, hello])


def test_golden_tokens(stories, golden):
    cases = golden[:3]
    params = [GREEDY.clone(max_tokens=48) for _ in cases]
    # One of them starts from the beginning-of-sequence token alone, which has no text.
    outputs = run(stories, [case["prompt"] or case["prompt_ids"] for case in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.outputs[0].token_ids == case["greedy_ids"][:48]
        assert case["text"].strip().startswith(output.outputs[0].text.strip())


PROMPTS = ["Once upon a time", "Lily and Tom went to the park", "The cat", "One day", "He was happy", "Mom said"]
SAMPLED = [SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=12) for seed in range(6)]


@pytest.fixture(scope="module")
def answers(stories):
    """Each prompt alone: greedy and sampled."""
    return [run(stories, prompt)[0].outputs[0].token_ids for prompt in PROMPTS], [
        run(stories, prompt, params)[0].outputs[0].token_ids for prompt, params in zip(PROMPTS, SAMPLED, strict=True)
    ]


def test_answers_differ(answers):
    greedy, sampled = answers
    assert len({tuple(answer) for answer in greedy}) == len(PROMPTS)
    assert greedy != sampled


def test_company_changes_nothing(stories, answers):
    greedy, sampled = answers
    assert ids(run(stories, PROMPTS)) == greedy
    assert ids(run(stories, PROMPTS[::-1], SAMPLED[::-1])) == sampled[::-1]


@pytest.mark.parametrize(
    "engine",
    [
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"enable_prefix_caching": False},
        {"block_size": 4, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 12, "block_size": 4, "max_model_len": 44},
    ],
    ids=["chunks", "no prefix cache", "small blocks", "preemption"],
)
def test_the_engines_shape_changes_nothing(stories_dir, answers, engine):
    with LLM(str(stories_dir / "hf"), **({"num_gpu_blocks_override": 512} | engine)) as llm:
        assert (ids(run(llm, PROMPTS)), ids(run(llm, PROMPTS, SAMPLED))) == answers
        if engine.get("num_gpu_blocks_override") == 12:
            assert llm.llm_engine.engine_core.handle.stats()["num_preemptions"] > 0


def test_the_prefix_cache_is_used_and_changes_nothing(stories):
    prompt = "Once upon a time there was a little girl who loved to play outside with her dog and her red ball."
    first, second = run(stories, prompt)[0], run(stories, prompt)[0]
    assert second.num_cached_tokens >= 16
    assert ids([first]) == ids([second])


def test_sample_i_has_seed_plus_i(stories):
    params = SamplingParams(n=3, seed=41, max_tokens=8)
    [together] = run(stories, "Once", params)
    alone = [run(stories, "Once", params.clone(n=1, seed=41 + i))[0].outputs[0].token_ids for i in range(3)]
    assert [sample.token_ids for sample in together.outputs] == alone
    assert len({tuple(answer) for answer in alone}) > 1


def test_requests_without_a_seed_differ_and_engines_agree(stories_dir):
    def two():
        with LLM(str(stories_dir / "hf"), num_gpu_blocks_override=64, seed=7) as llm:
            return ids(run(llm, ["Once", "Once"], SamplingParams(max_tokens=40)))

    first = two()
    assert first[0] != first[1]
    assert two() == first


def test_min_tokens_holds_the_end_back(stories):
    [free] = ids(run(stories, "Once"))
    stop = free[2]
    held = run(stories, "Once", GREEDY.clone(stop_token_ids=[stop]))[0].outputs[0]
    assert (held.finish_reason, held.stop_reason, len(held.token_ids)) == ("stop", stop, free.index(stop) + 1)
    later = run(stories, "Once", GREEDY.clone(stop_token_ids=[stop], min_tokens=8))[0].outputs[0]
    assert len(later.token_ids) >= 8
    assert stop not in later.token_ids[:8]


def test_penalties_discourage(stories):
    [plain] = ids(run(stories, "Once", GREEDY.clone(max_tokens=40)))
    [varied] = ids(run(stories, "Once", GREEDY.clone(max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0)))
    [unlike] = ids(run(stories, "Once", GREEDY.clone(max_tokens=40, repetition_penalty=5.0)))
    assert len(set(varied)) > len(set(plain))
    assert len(set(unlike)) > len(set(plain))


def test_a_stop_string_ends_the_text(stories):
    [whole] = run(stories, "Once", GREEDY.clone(max_tokens=40))
    stop = whole.outputs[0].text[10:14]
    sample = run(stories, "Once", GREEDY.clone(max_tokens=40, stop=stop))[0].outputs[0]
    assert sample.text == whole.outputs[0].text[: whole.outputs[0].text.index(stop)]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


def test_wrong_requests_leave_the_engine_as_it_was(stories, answers):
    for prompt, params in [("", GREEDY), ([512], GREEDY), ([-1], GREEDY), ([1] * 512, GREEDY), ("a", SAMPLED)]:
        with pytest.raises(InvalidRequestError):
            run(stories, prompt, params)
    assert ids(run(stories, PROMPTS[:1])) == answers[0][:1]


def test_a_step_that_fails_leaves_the_engine_usable(stories, answers, monkeypatch):
    runner = stories.llm_engine.engine_core.core.executor._runner
    calls = []
    sample = runner.sampler.sample

    def fail_once(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return sample(*args)

    monkeypatch.setattr(runner.sampler, "sample", fail_once)
    with pytest.raises(RequestFailedError, match="out of luck"):
        run(stories, PROMPTS)
    assert ids(run(stories, PROMPTS)) == answers[0]
    stories.llm_engine.engine_core.core.scheduler.check_invariants()


def test_an_abort_changes_nothing_for_others(stories, answers):
    engine = stories.llm_engine
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, GREEDY)
    last = {}
    for step in range(1000):
        if step == 4:
            engine.abort_request(["1", "3"])
        last |= {output.request_id: output for output in engine.step()}
        if not engine.has_unfinished_requests():
            break
    for index, answer in enumerate(answers[0]):
        if index in (1, 3):
            assert last[str(index)].outputs[0].finish_reason == "abort"
        else:
            assert last[str(index)].outputs[0].token_ids == answer


def test_two_models_in_one_process(stories, gpt2, answers):
    assert ids(run(gpt2, "Hello")) == ids(run(gpt2, "Hello"))
    assert ids(run(stories, PROMPTS[:1])) == answers[0][:1]


def test_weights_that_cannot_be_read(stories_dir, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((stories_dir / "hf" / name).read_bytes())
    with pytest.raises(ModelLoadError, match="safetensors"):
        LLM(str(tmp_path))
    whole = (stories_dir / "hf/model.safetensors").read_bytes()
    for broken in (whole[:1000], whole[:-100], b"", b"\xff" * 64):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
            LLM(str(tmp_path))


def test_memory_comes_back(stories_dir):
    import weakref

    llm = LLM(str(stories_dir / "hf"), num_gpu_blocks_override=64)
    model = weakref.ref(llm.llm_engine.engine_core.core.executor._runner.model)
    llm.shutdown()
    gc.collect()
    assert model() is None


def test_embedded_model():
    with LLM(num_gpu_blocks_override=256) as llm:
        outputs = run(llm, ["Hello", "Once upon a time"], GREEDY)
        assert all(output.outputs[0].text.strip() for output in outputs)
        [answer] = llm.chat([{"role": "user", "content": "Hello!"}], GREEDY, use_tqdm=False)
        assert answer.outputs[0].text.strip()
        assert llm.llm_engine.config.model.served_model_name[0] == "rustvllm-tiny"


EXIT_SCRIPT = """
import asyncio
from rustvllm import AsyncLLM, SamplingParams
from rustvllm.config.engine_args import AsyncEngineArgs

engine = AsyncLLM.from_engine_args(AsyncEngineArgs(num_gpu_blocks_override=512))

async def main():
    for index in range(16):
        await engine.add_request(str(index), "Once", SamplingParams(max_tokens=400, ignore_eos=True))
    while engine.stats()["num_running"] < 16:
        await asyncio.sleep(0.01)

asyncio.run(main())
"""


def test_the_interpreter_exits_cleanly_while_the_engine_generates():
    done = subprocess.run([sys.executable, "-c", EXIT_SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


FORKED = """
import os, sys
from rustvllm import LLM, SamplingParams
from rustvllm.exceptions import ConfigError, EngineDeadError

SMALL = {"num_gpu_blocks_override": 64, "max_num_seqs": 2}
params = SamplingParams(temperature=0, max_tokens=2)
llm = LLM(**SMALL)
print(len(llm.generate("Once", params, use_tqdm=False)), flush=True)
parent, child = os.getpid(), os.fork()
if not child:
    for call in (lambda: llm.generate("Once", params), lambda: llm.enqueue("Once"), llm.reset_prefix_cache):
        try:
            call()
        except EngineDeadError as error:
            print(f"belongs to process {parent} and" in str(error), flush=True)
    try:
        LLM(**SMALL)
    except ConfigError as error:
        print("method 'spawn'" in str(error), flush=True)
    llm.shutdown()
    sys.exit(0)
print(os.waitpid(child, 0)[1], len(llm.generate("Once", params, use_tqdm=False)), flush=True)
"""


def test_a_fork_says_that_its_threads_are_gone_instead_of_waiting_for_them():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", FORKED], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout.split() == ["1", *["True"] * 4, "0", "1"], ended.stdout + ended.stderr
    assert ended.returncode == 0, ended.stderr
