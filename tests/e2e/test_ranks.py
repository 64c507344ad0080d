"""Several ranks give the tokens of one process, and leave nothing behind, however they end.

With tensor parallelism, each rank holds its part of every layer and compares its hidden states with the others' after
every forward pass. With pipeline parallelism, each rank holds some layers, and the stages run several steps at once.
"""

import gc
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rank_engines import (
    SMALL,
    assert_gone,
    executor_of,
    generate_without_end,
    mixed_params,
    prompts,
    ranks_of,
    start,
    tokens,
)
from rustvllm import LLM, SamplingParams, StructuredOutputsParams
from rustvllm.distributed.commands import Command
from rustvllm.exceptions import ConfigError, EngineDeadError, ModelLoadError, RustVLLMError
from rustvllm.worker.step_output import ModelRunnerOutput

pytestmark = pytest.mark.usefixtures("rank_environment")


@pytest.fixture(scope="module")
def pair(rank_environment: None) -> Iterator[LLM]:
    before = ranks_of(os.getpid())
    with start(tensor_parallel_size=2, preemption_mode="swap", swap_space=0.02) as llm:
        mine = [each for each in ranks_of(os.getpid()) if each not in before]
        yield llm
    assert_gone(mine)


@pytest.fixture(scope="module")
def alone(rank_environment: None) -> Iterator[LLM]:
    with start(num_gpu_blocks_override=400) as llm:
        yield llm


def stats(llm: LLM) -> dict[str, Any]:
    return dict(llm.llm_engine.engine_core.core.scheduler.stats())


def test_a_rank_holds_its_share_of_the_heads(pair: LLM, alone: LLM) -> None:
    shared, whole = (executor_of(llm)._worker.runner.model for llm in (pair, alone))
    assert (shared.kv_cache_spec.num_kv_heads, whole.kv_cache_spec.num_kv_heads) == (2, 4)


def test_ranks_give_the_tokens_of_one_through_swaps_chunks_and_prefix_hits(pair: LLM, alone: LLM) -> None:
    params = mixed_params()
    expected = tokens(alone, params, prompts(8))
    assert tokens(pair, params, prompts(8)) == expected
    before = stats(pair)["prefix_cache_hits"]
    assert tokens(pair, params[6:], prompts(8)[6:]) == expected[6:], "what is cached differs"
    after = stats(pair)
    assert after["prefix_cache_hits"] > before
    assert after["num_swapped_out"] > 0
    assert executor_of(pair).rank_views()[1].collectives > 0
    assert len({str(each) for each in expected}) > 4, "output that is all the same proves nothing"


def named_scores(llm: LLM) -> list[float]:
    """Log-probabilities of named tokens: at the places of an output, and of a prompt from its third place on."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprob_token_ids=[7, 3])
    params = params.clone(prompt_logprob_token_ids=[[9, 2], [4, 8], [1, 1], [60, 61]], prompt_logprob_start=2)
    [output] = llm.generate([{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]}], params, use_tqdm=False)
    of_prompt = [] if output.prompt_token_id_logprobs is None else output.prompt_token_id_logprobs.ravel().tolist()
    return [place[7].logprob for place in output.outputs[0].logprobs or []] + of_prompt


def test_beams_grammars_and_log_probabilities_are_rank_0s_alone(pair: LLM, alone: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1)
    choice = SamplingParams(
        temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["red", "green"])
    )
    both = []
    for llm in (pair, alone):
        [scored, *_] = llm.generate(prompts(3), greedy, use_tqdm=False)
        [chosen] = llm.generate(["Once"], choice, use_tqdm=False)
        sample = scored.outputs[0]
        values = [max(each.logprob for each in place.values()) for place in sample.logprobs or []]
        of_prompt = [
            sorted(each.logprob for each in place.values()) for place in (scored.prompt_logprobs or []) if place
        ]
        both.append((list(sample.token_ids), chosen.outputs[0].text, values, of_prompt))
    (ids, text, values, of_prompt), (other_ids, other_text, other_values, other_of_prompt) = both
    assert (ids, text) == (other_ids, other_text)
    assert text in ("red", "green")
    assert values == pytest.approx(other_values, abs=1e-4)
    assert len(of_prompt) == len(other_of_prompt) > 0
    for place, other in zip(of_prompt, other_of_prompt, strict=True):
        assert place == pytest.approx(other, abs=1e-4)
    assert named_scores(pair) == pytest.approx(named_scores(alone), abs=1e-4)


def test_a_step_that_rank_0_fails_to_sample_harms_no_other(pair: LLM, alone: LLM, monkeypatch: Any) -> None:
    runner = executor_of(pair)._worker.runner

    def fail(*_: Any) -> None:
        raise ValueError("sampling failed on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(runner.sampler, "sample", fail)
        with pytest.raises(RustVLLMError, match="on purpose"):
            tokens(pair, SamplingParams(temperature=0.0, max_tokens=4), prompts(2))
    params = SamplingParams(temperature=0.0, max_tokens=8)
    assert tokens(pair, params, prompts(4)) == tokens(alone, params, prompts(4))


def test_the_other_rank_learns_what_overlapping_steps_sample(alone: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is launched on both ranks before the previous one's tokens are known; rank 0 sends what it sampled.

    Hidden states are compared after each step, so that a rank which read other ids would end the engine.
    """
    monkeypatch.setattr(ModelRunnerOutput, "is_done", lambda _: False)  # else the CPU has nothing to overlap
    params = mixed_params()
    expected = tokens(alone, params, prompts(8))
    before = ranks_of(os.getpid())
    with start(tensor_parallel_size=2, async_scheduling=True, preemption_mode="swap", swap_space=0.02) as llm:
        [rank] = [each for each in ranks_of(os.getpid()) if each not in before]
        runner = executor_of(llm)._worker.runner
        unknown, find = [], runner._unknown_ids

        def counted(*arguments: Any) -> Any:
            found = find(*arguments)
            unknown.append(found is not None)
            return found

        monkeypatch.setattr(runner, "_unknown_ids", counted)
        assert tokens(llm, params, prompts(8)) == expected
        assert unknown.count(True) > len(unknown) // 2 > 20, "steps did not overlap"
        assert stats(llm)["num_swapped_out"] > 0
        fails_at, sample = [3], runner.sampler.sample

        def fail(*arguments: Any) -> Any:
            fails_at[0] -= 1
            if not fails_at[0]:
                raise ValueError("sampling failed on purpose")
            return sample(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(runner.sampler, "sample", fail)
            with pytest.raises(RustVLLMError, match="on purpose"):
                tokens(llm, params, prompts(8))
        assert tokens(llm, params, prompts(8)) == expected, "a step that failed left the other rank behind"
        killer = threading.Timer(0.2, rank.kill)
        killer.start()
        with pytest.raises(EngineDeadError, match=rf"worker rank 1 \(node 0, pid {rank.pid}\) was killed by SIGKILL"):
            generate_without_end(llm)
        killer.join()
        assert_gone([rank])


def test_nothing_happens_while_there_is_nothing_to_do(pair: LLM) -> None:
    [rank] = ranks_of(os.getpid())
    published = executor_of(pair)._writer.published
    before = rank.cpu_times()
    time.sleep(2.0)
    after = rank.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) <= 0.02, "a rank that waits takes a processor"
    assert executor_of(pair)._writer.published == published
    states = executor_of(pair).rank_states()
    assert [(state["rank"], state["pid"]) for state in states] == [(0, os.getpid()), (1, rank.pid)]
    assert [state["step_age"] for state in states] == [0.0, 0.0]
    assert states[1]["state"] == "sleeping"


def test_a_stopped_rank_is_named(pair: LLM) -> None:
    [rank] = ranks_of(os.getpid())
    stalls = executor_of(pair).stalls
    assert stalls.look() is None
    rank.suspend()
    try:
        number = executor_of(pair)._writer.publish(Command.PING, [], 1.0)
        deadline = time.monotonic() + 30
        stalls._stall_timeout = 0.2
        while (report := stalls.look()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        states = executor_of(pair).rank_states()
    finally:
        rank.resume()
    executor_of(pair)._writer.wait_done(number, 30.0)
    stalls._stall_timeout = 60.0
    assert states[1]["state"] == "stopped"
    assert states[1]["step_age"] > 0.1
    assert f"worker rank 1 (node 0, pid {rank.pid}) is stopped and is in no collective" in report
    assert "no step ended for 0." in report
    assert stalls.look() is None


def test_the_layer_and_the_python_stack_of_a_rank_are_known(pair: LLM) -> None:
    """Stops rank 1 at random moments until rank 0 waits for it within a layer."""
    executor, [rank] = executor_of(pair), ranks_of(os.getpid())
    stack = executor._ranks.processes[0].stack()
    assert re.search(r'worker/process\.py", line \d+ in run', stack), stack
    found: list[tuple[Any, Any, str]] = []
    is_over = threading.Event()

    def stop_and_look() -> None:
        while not found and not is_over.is_set():
            rank.suspend()
            time.sleep(0.05)
            [own, other] = executor.rank_views()
            if own.waits_in == "all_reduce" and own.layer >= 0:
                found.append((own, other, executor.stalls.describe()))
            rank.resume()
            time.sleep(0.01)

    looker = threading.Thread(target=stop_and_look)
    looker.start()
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    deadline = time.monotonic() + 30
    while not found and time.monotonic() < deadline:
        tokens(pair, params, prompts(1))
    is_over.set()
    looker.join()
    assert found, "the other rank was never waited for in a layer"
    [(own, other, words)] = found
    num_layers = executor._worker.runner.model.kv_cache_spec.num_layers
    assert own.layer < num_layers
    assert other.state == "stopped"
    assert words.startswith("worker rank 1 (node 0, pid")
    assert words.endswith(
        f"; rank 0 (node 0, pid {os.getpid()}) is running and waits in all_reduce of layer {own.layer}"
    )


def test_a_rank_that_is_killed_is_named_and_the_others_end(pair: LLM) -> None:
    """Must be the last test that uses ``pair``: it ends that engine."""
    seed = random.SystemRandom().randrange(1000)
    [rank] = ranks_of(os.getpid())
    killer = threading.Timer(random.Random(seed).uniform(0.0, 0.5), rank.kill)
    killer.start()
    with pytest.raises(EngineDeadError) as death:
        generate_without_end(pair)
    killer.join()
    assert str(death.value) == f"worker rank 1 (node 0, pid {rank.pid}) was killed by SIGKILL", f"seed {seed}"
    assert_gone([rank])


@pytest.mark.slow
def test_one_of_three_ranks_that_is_killed_takes_the_others_along() -> None:
    with start(tensor_parallel_size=3, hf_overrides={"n_head": 6}) as llm:
        mine = ranks_of(os.getpid())
        assert len(mine) == 2
        killer = threading.Timer(0.3, mine[1].kill)
        killer.start()
        with pytest.raises(
            EngineDeadError, match=rf"worker rank 2 \(node 0, pid {mine[1].pid}\) was killed by SIGKILL"
        ):
            generate_without_end(llm)
        killer.join()
        assert_gone(mine)


@pytest.mark.slow
def test_an_engine_that_is_dropped_leaves_no_rank() -> None:
    before = ranks_of(os.getpid())
    llm = start(tensor_parallel_size=2)
    mine = [each for each in ranks_of(os.getpid()) if each not in before]
    assert len(mine) == 1
    del llm
    gc.collect()
    assert_gone(mine)


@pytest.mark.slow
def test_ranks_end_with_a_script_that_is_killed_and_one_that_raises(tmp_path: Any) -> None:
    """The script has no ``if __name__`` guard: ranks must not run it again."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from rustvllm import LLM
        llm = LLM(hf_overrides={"n_head": 4}, tensor_parallel_size=2, num_gpu_blocks_override=40, max_num_seqs=4)
        print("ready", flush=True)
        sys.stdin.readline()
        raise SystemExit(len(llm.generate("Once", use_tqdm=False)) + 6)
        """)
    )
    for number in (None, signal.SIGKILL):
        with subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            mine = ranks_of(process.pid)
            assert len(mine) == 1
            if number is None:
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.wait(60) == 7
            else:
                process.send_signal(number)
            assert_gone(mine)


def test_what_a_rank_cannot_do_at_the_start_is_said_by_name(monkeypatch: Any) -> None:
    monkeypatch.setattr("rustvllm.distributed.facts.importlib.metadata.version", lambda _: "1.2.3")
    before = ranks_of(os.getpid())
    with pytest.raises(ConfigError, match=r"worker rank 1 has another torch than rank 0: \S+ and 1\.2\.3") as error:
        start(tensor_parallel_size=2)
    assert "use the same installation and model for all ranks" in str(error.value)
    assert ranks_of(os.getpid()) == before


@pytest.mark.slow
def test_a_rank_that_dies_while_it_starts_ends_the_start(monkeypatch: Any) -> None:
    from rustvllm.executor import ranks

    before = ranks_of(os.getpid())
    listen = ranks.RankProcess.listen

    def kill_first(self: Any, on_hello: Any) -> None:
        listen(self, lambda rank: (os.kill(self.pid, signal.SIGKILL), on_hello(rank)))

    monkeypatch.setattr(ranks.RankProcess, "listen", kill_first)
    with pytest.raises(RustVLLMError, match=r"worker rank 1 \(node 0, pid \d+\) was killed by SIGKILL"):
        start(tensor_parallel_size=2)
    assert ranks_of(os.getpid()) == before


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_all_ranks(tmp_path: Any) -> None:
    before = ranks_of(os.getpid())
    (tmp_path / "config.json").write_text(
        '{"architectures": ["GPT2LMHeadModel"], "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2, '
        '"n_positions": 64}'
    )
    with pytest.raises(ModelLoadError, match=r"safetensors"):
        LLM(str(tmp_path), tensor_parallel_size=2, skip_tokenizer_init=True, device="cpu")
    assert ranks_of(os.getpid()) == before


@pytest.fixture(scope="module")
def staged(rank_environment: None) -> Iterator[LLM]:
    before = ranks_of(os.getpid())
    with start(pipeline_parallel_size=2, preemption_mode="swap", swap_space=0.02) as llm:
        mine = [each for each in ranks_of(os.getpid()) if each not in before]
        yield llm
    assert_gone(mine)


def steps_under_way(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each launched step, by the number of steps that only the other stages have begun."""
    executor, seen = executor_of(llm), []
    execute = executor.execute_model

    def counted(output: Any) -> None:
        execute(output)
        seen.append(len(executor._ahead))

    monkeypatch.setattr(executor, "execute_model", counted)
    return seen


def test_stages_give_the_tokens_of_one_process_through_swaps_chunks_and_prefix_hits(
    staged: LLM, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_layers = [executor_of(llm)._worker.runner.model.kv_cache_spec.num_layers for llm in (staged, alone)]
    assert num_layers[0] == num_layers[1] // 2
    seen = steps_under_way(staged, monkeypatch)
    params = mixed_params()
    expected = tokens(alone, params, prompts(8))
    assert tokens(staged, params, prompts(8)) == expected
    before = stats(staged)["prefix_cache_hits"]
    assert tokens(staged, params[6:], prompts(8)[6:]) == expected[6:], "what is cached differs"
    after = stats(staged)
    assert after["prefix_cache_hits"] > before
    assert after["num_swapped_out"] > 0
    assert seen.count(2) > len(seen) // 2, "the stages ran one after the other"
    views = executor_of(staged).rank_views()
    assert views[0].collectives >= len(seen), "rank 0 takes what the stage before it gives"
    assert [(view.rank, view.stage, view.num_stages) for view in views] == [(0, 1, 2), (1, 0, 2)]
    assert "worker rank 1 of stage 0 (node 0, pid" in str(views[1])
    assert len({str(each) for each in expected}) > 4, "output that is all the same proves nothing"


def test_beams_grammars_and_log_probabilities_are_those_of_the_last_stage(staged: LLM, alone: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1)
    choice = SamplingParams(
        temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["red", "green"])
    )
    beams = SamplingParams(use_beam_search=True, n=2, temperature=0.0, max_tokens=8)
    both = []
    for llm in (staged, alone):
        scored = llm.generate(prompts(4), greedy, use_tqdm=False)
        chosen = llm.generate(["Once", "There"], [choice, greedy], use_tqdm=False)
        values = [
            max(each.logprob for each in place.values()) for out in scored for place in out.outputs[0].logprobs or []
        ]
        of_prompts = [
            max(each.logprob for each in place.values())
            for out in scored
            for place in out.prompt_logprobs or []
            if place
        ]
        ids = [list(out.outputs[0].token_ids) for out in scored]
        both.append((ids, chosen[0].outputs[0].text, tokens(llm, beams, prompts(3)), values + of_prompts))
    (ids, text, searched, values), (other_ids, other_text, other_searched, other_values) = both
    assert (ids, text, searched) == (other_ids, other_text, other_searched)
    assert text in ("red", "green")
    assert len(values) == len(other_values) > 40
    assert values == pytest.approx(other_values, abs=1e-4)
    assert named_scores(staged) == pytest.approx(named_scores(alone), abs=1e-4)
    assert len(named_scores(alone)) == 8 + 4 * 2


def test_requests_that_leave_while_their_step_is_under_way_harm_no_other(staged: LLM, alone: LLM) -> None:
    engine = staged.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, presence_penalty=0.5)
    expected = tokens(alone, params, prompts(6))
    for number, prompt in enumerate(prompts(6)):
        engine.add_request(f"leaves-{number}", prompt, params)
    found: dict[str, list[int]] = {}
    for number in range(200):
        if not engine.has_unfinished_requests():
            break
        if number == 3:
            assert executor_of(staged)._ahead, "no step is under way"
            engine.abort_request(["leaves-0", "leaves-3"])
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    for number in (1, 2, 4, 5):
        assert found[f"leaves-{number}"] == expected[number][0]


def test_a_step_that_cannot_be_sampled_ends_its_requests_and_no_others(
    staged: LLM, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = executor_of(staged)._worker.runner

    def fail(*_: Any) -> None:
        raise ValueError("sampling failed on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(runner.sampler, "sample", fail)
        with pytest.raises(RustVLLMError, match="on purpose"):
            tokens(staged, SamplingParams(temperature=0.0, max_tokens=4), prompts(4))
    params = SamplingParams(temperature=0.0, max_tokens=8)
    assert tokens(staged, params, prompts(4)) == tokens(alone, params, prompts(4))


def test_a_stage_that_is_killed_is_named(staged: LLM) -> None:
    """Must be the last test that uses ``staged``: it ends that engine."""
    [rank] = ranks_of(os.getpid())
    killer = threading.Timer(0.2, rank.kill)
    killer.start()
    with pytest.raises(EngineDeadError) as death:
        generate_without_end(staged)
    killer.join()
    assert str(death.value) == f"worker rank 1 (node 0, pid {rank.pid}) was killed by SIGKILL"
    assert_gone([rank])


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "overlaps"), [(None, True), ("int8", False)])
def test_two_stages_of_two_ranks(quantization: str | None, overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages always overlap: ``async_scheduling`` is accepted and changes nothing."""
    # Rounded, an activation that is nearly halfway goes another way where sums differ in their last bits.
    monkeypatch.setenv("RUSTVLLM_ACTIVATIONS", "float")
    params = mixed_params()
    with start(num_gpu_blocks_override=400, quantization=quantization) as one:
        expected = tokens(one, params, prompts(8))
    before = ranks_of(os.getpid())
    sizes: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "async_scheduling": overlaps}
    with start(**sizes, quantization=quantization) as llm:
        seen = steps_under_way(llm, monkeypatch)
        assert tokens(llm, params, prompts(8)) == expected
        assert seen.count(2) > len(seen) // 2
        mine = [each for each in ranks_of(os.getpid()) if each not in before]
        assert len(mine) == 3
        killer = threading.Timer(0.2, mine[2].kill)
        killer.start()
        with pytest.raises(
            EngineDeadError, match=rf"worker rank 3 \(node 0, pid {mine[2].pid}\) was killed by SIGKILL"
        ):
            generate_without_end(llm)
        killer.join()
        assert_gone(mine)


@pytest.mark.slow
def test_as_many_steps_are_under_way_as_there_are_stages(alone: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = mixed_params()
    expected = tokens(alone, params, prompts(8))
    with start(pipeline_parallel_size=6, max_num_seqs=12, num_gpu_blocks_override=60) as llm:
        assert executor_of(llm)._worker.stage.count == 6
        seen = steps_under_way(llm, monkeypatch)
        assert tokens(llm, params, prompts(8)) == expected
        assert seen.count(6) > len(seen) // 4, "stages waited for each other"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pipeline_parallel_size": 13}, r"pipeline_parallel_size 13 .* is more than the \d+ layers .* would work"),
        (
            {"pipeline_parallel_size": 2, "speculative_config": {"method": "auto"}},
            "pipeline_parallel_size is 2 .* speculative_config",
        ),
        ({"pipeline_parallel_size": 2, "enable_lora": True}, "pipeline_parallel_size is 2 .* enable_lora"),
        ({"pipeline_parallel_size": 2, "executor": "sim"}, "pipeline_parallel_size is 2 .* executor=sim"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"}, "uni, .* pipeline_parallel_size is 2"),
        ({"pipeline_parallel_size": 16, "tensor_parallel_size": 8}, "is 128 ranks, but at most 64"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be at least 1, got 0"),
        ({"pipeline_parallel_size": "2"}, "pipeline_parallel_size must be an integer, got '2'"),
    ],
)
def test_what_stages_cannot_do_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(**{**SMALL, **options})
