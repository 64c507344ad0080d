"""The simulated executor: its tokens depend on nothing but the request, its steps take their time, torch stays out."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from rustvllm import LLM, SamplingParams, _core
from rustvllm.config.engine_args import EngineArgs
from rustvllm.exceptions import ConfigError, ModelLoadError, SchedulerStateError
from rustvllm.executor.sim import SimExecutor

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = [[6, 7, 5 + index] * 20 for index in range(6)]


@pytest.fixture
def make_llm():
    made = []

    def make(**changes):
        made.append(LLM(executor="sim", **changes))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


def ids(outputs):
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def generate(llm, prompts, params):
    return ids(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False))


def test_a_stream_looks_like_text(make_llm):
    [output] = make_llm().generate("Once upon a time", SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
    [sample] = output.outputs
    assert (len(sample.token_ids), sample.finish_reason) == (200, "length")
    words = sample.text.split()
    assert len(words) == 200
    assert all(word.isalpha() and word.islower() for word in words)
    assert len(set(words)) > 50


def test_greedy_answers_depend_on_their_prompt_alone(make_llm):
    together = generate(make_llm(), PROMPTS, GREEDY)
    assert len({tuple(answer) for (answer,) in together}) == len(PROMPTS)
    alone = make_llm(max_num_seqs=1, max_num_batched_tokens=16, enable_prefix_caching=False)
    assert [generate(alone, [prompt], GREEDY)[0] for prompt in PROMPTS] == together
    # So few blocks that requests are preempted, and computed again or swapped.
    for how in ({}, {"preemption_mode": "swap", "swap_space": 0.01}):
        crowded = make_llm(num_gpu_blocks_override=14, max_model_len=96, max_num_seqs=6, **how)
        assert generate(crowded, PROMPTS, GREEDY) == together
        assert crowded.llm_engine.engine_core.scheduler.stats()["num_preemptions"] > 0


def test_seeds_decide_where_the_temperature_lets_them(make_llm):
    llm = make_llm()
    prompts = [PROMPTS[0]] * 2

    def answers(*seeds, temperature):
        params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=8) for seed in seeds]
        return [answer for (answer,) in generate(llm, prompts, params)]

    first, second = answers(1, 2, temperature=1.0)
    assert first != second
    assert answers(2, 1, temperature=1.0) == [second, first]
    assert len({tuple(answer) for answer in answers(1, 2, temperature=0.0)}) == 1
    [samples] = generate(llm, prompts[:1], SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=8))
    assert len({tuple(sample) for sample in samples}) == 3


def test_stop_strings_end_an_answer(make_llm):
    llm = make_llm()
    [whole] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    word = whole.outputs[0].text.split()[3]
    [output] = llm.generate("Once upon a time", GREEDY.clone(stop=[f" {word}"]), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text == whole.outputs[0].text[: whole.outputs[0].text.index(f" {word}")]


@pytest.mark.parametrize(("asked", "length"), [({}, 7), ({"min_tokens": 9}, 9), ({"ignore_eos": True}, 24)])
def test_eos_comes_when_asked_for(make_llm, asked, length):
    llm = make_llm(sim_eos_after=7)
    [output] = llm.generate([[5, 6, 7]], GREEDY.clone(**asked), use_tqdm=False)
    [sample] = output.outputs
    assert sample.finish_reason == ("length" if length == 24 else "stop")
    assert len(sample.text.split()) == (23 if length == 24 else length)


def test_stop_ids_wait_for_min_tokens(make_llm):
    llm = make_llm()
    prompt = [[5, 6, 7]]
    [[plain]] = generate(llm, prompt, GREEDY)
    stops = [plain[0], plain[1]]
    [[at_once]] = generate(llm, prompt, GREEDY.clone(stop_token_ids=stops))
    assert at_once == plain[:1], "the stop id is really met"
    [[later]] = generate(llm, prompt, GREEDY.clone(stop_token_ids=stops, min_tokens=6))
    assert len(later) > 6
    assert not set(stops) & set(later[:6])
    [[again]] = generate(llm, prompt, GREEDY.clone(stop_token_ids=stops))
    assert again == at_once, "the row's next request has none"


def test_a_step_takes_its_time(make_llm):
    llm = make_llm(sim_step_time=5.0, sim_time_per_token=0.5, sim_time_per_context_token=0.01)
    begin = time.perf_counter()
    generate(llm, [[5] * 40], SamplingParams(temperature=0, max_tokens=10))
    seconds = time.perf_counter() - begin
    tokens, context = 40 + 9, 40 + sum(range(41, 50))
    expected = (5.0 * 10 + 0.5 * tokens + 0.01 * context) / 1000
    assert expected <= seconds < expected + 0.2


def test_calls_out_of_order_and_a_step_that_is_forgotten():
    config = EngineArgs(executor="sim", skip_tokenizer_init=True, max_num_seqs=4).create_engine_config("llm_class")
    executor = SimExecutor(config, config.sim)
    executor.load_model()
    assert executor.words.size == 2048 - len(config.model.eos_token_ids)
    num_blocks = executor.determine_num_blocks()
    assert num_blocks == 1 + 4 * 512 // 16
    core_config = _core.SchedulerConfig(num_blocks=num_blocks, max_model_len=512, max_num_seqs=4)
    scheduler = _core.Scheduler(
        core_config, executor.initialize_kv_cache(num_blocks, _core.step_buffer_spec(core_config), 2)
    )
    scheduler.handle.add_request(scheduler.handle.new_key(), "a", [5, 6, 7], max_tokens=3, temperature=0.0)
    with pytest.raises(SchedulerStateError, match="after execute_model"):
        executor.sample_tokens()
    output = scheduler.schedule()
    executor.execute_model(output)
    with pytest.raises(SchedulerStateError, match="must be called after"):
        executor.execute_model(output)
    executor.discard_step()
    executor.execute_model(output)
    sampled = executor.sample_tokens().get_output().sampled_token_ids
    assert (sampled.shape, sampled.dtype, sampled.flags.c_contiguous) == ((1, 1), np.int32, True)
    scheduler.update_from_output(output, sampled)
    executor.shutdown()


def test_any_vocabulary_will_do(toy_model, tmp_path):
    def words(folder, **changes):
        args = EngineArgs(model=str(folder), executor="sim", **changes)
        config = args.create_engine_config("llm_class")
        executor = SimExecutor(config, config.sim)
        executor.load_model()
        return executor.words.tolist()

    # A vocabulary of bytes has no words; its letters do.
    assert words(toy_model) == list(range(ord("a"), ord("z") + 1))
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 50, "n_embd": 4, "n_layer": 1, "n_head": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_positions": 64}))
    with pytest.raises(ModelLoadError, match="sim_eos_after is set"):
        words(tmp_path, skip_tokenizer_init=True, sim_eos_after=3)
    with pytest.raises(ModelLoadError, match=r"neither tokenizer\.json nor"):
        words(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot read the tokenizer"):
        words(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"executor": "ray"}, "executor must be one of auto, uniproc, sim, got 'ray'"),
        ({"executor": "sim", "device": "cuda"}, "contradict each other"),
        (
            {"executor": "sim", "sim_step_time": -1.0},
            "sim_step_time must be between 0 and 60000 milliseconds, got -1.0",
        ),
        ({"executor": "sim", "sim_time_per_token": float("nan")}, "sim_time_per_token must be"),
        ({"executor": "sim", "sim_eos_after": -1}, "sim_eos_after must be at least 0"),
        ({"sim_step_time": 3.0}, "sim_step_time needs executor=sim"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**arguments).create_engine_config()


def test_it_needs_no_torch():
    code = (
        "from rustvllm import LLM\n"
        "import sys\n"
        "llm = LLM(executor='sim')\n"
        "llm.generate('Once', use_tqdm=False)\n"
        "llm.shutdown()\n"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)), 'rustvllm.executor.sim' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[] True"
