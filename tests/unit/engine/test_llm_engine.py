"""``LLMEngine`` over the real core: steps, outputs, aborts, failures. The toy model counts up."""

import pytest

from rustvllm import LLMEngine, SamplingParams
from rustvllm.exceptions import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError
from rustvllm.sampling_params import PromptOnlyParams, RequestOutputKind
from rustvllm.tenant import Tenant

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def make(toy_config, toy_executors):
    engines = []

    def build(**changes):
        engines.append(LLMEngine.from_engine_config(toy_config(**changes)))
        return engines[-1]

    yield build
    for engine in engines:
        engine.shutdown()


def finish(engine):
    """Run to the end; every output by request id."""
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def texts(outputs):
    return {request_id: several[-1].outputs[0].text for request_id, several in outputs.items()}


def test_a_request_is_a_prompt_and_then_one_token_a_step(make, toy_executors):
    engine = make()
    engine.add_request("r", "abcde", GREEDY)
    [executor] = toy_executors
    lengths = []
    while engine.has_unfinished_requests():
        lengths += [len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in engine.step()]
    assert executor.steps == [5, 1, 1, 1]
    assert lengths == [6, 7, 8, 9]


def test_the_samples_of_best_of_share_the_prompt_as_those_of_n_do(make, toy_executors):
    steps = []
    for changes in ({"n": 3}, {"best_of": 3}):
        engine = make()
        engine.add_request("r", "abcdefgh", SamplingParams(max_tokens=3, seed=1, **changes))
        finish(engine)
        steps.append(toy_executors[-1].steps)
    assert steps[0] == steps[1]
    assert sum(steps[0]) < 3 * 8, "the prompt was computed once"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_in_pieces_tells_how_far_it_is(make, async_scheduling):
    engine = make(max_num_batched_tokens=8, async_scheduling=async_scheduling)
    params = GREEDY.clone(output_kind=RequestOutputKind.DELTA, prompt_progress=True)
    engine.add_request("r", "a" * 21, params)
    outputs = finish(engine)["r"]
    told = [output.num_computed_prompt_tokens for output in outputs]
    assert [number for number in told if number is not None] == [8, 16, 21]
    assert [bool(output.outputs) for output in outputs[:3]] == [False, False, True]
    assert all(output.prompt_progress_time >= output.metrics.first_scheduled_time for output in outputs[:3])
    engine.add_request("r", "a" * 21, params)
    again = [output for output in finish(engine)["r"] if output.num_computed_prompt_tokens is not None]
    assert [(output.num_computed_prompt_tokens, output.num_cached_tokens) for output in again] == [(21, 20)]
    engine.add_request("r", "b" * 21, params.clone(prompt_progress=False))
    assert all(output.num_computed_prompt_tokens is None for output in finish(engine)["r"])


def test_a_prompt_that_only_is_computed_tells_it_too(make):
    engine = make(max_num_batched_tokens=8)
    params = PromptOnlyParams(output_kind=RequestOutputKind.DELTA, prompt_progress=True, max_tokens=0)
    engine.add_request("r", "a" * 21, params)
    outputs = finish(engine)["r"]
    assert [output.num_computed_prompt_tokens for output in outputs] == [8, 16, 21]
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_output(make):
    engine = make()
    engine.add_request("r", "ab", GREEDY)
    output = finish(engine)["r"][-1]
    assert (output.prompt, output.prompt_token_ids, output.finished, output.error) == ("ab", [97, 98], True, None)
    [sample] = output.outputs
    assert (sample.text, sample.token_ids, sample.finish_reason, sample.stop_reason) == (
        "cdef",
        [99, 100, 101, 102],
        "length",
        None,
    )
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time


def test_output_kinds(make):
    engine = make()
    for kind in RequestOutputKind:
        engine.add_request(kind.name, "a", GREEDY.clone(output_kind=kind))
    outputs = {name: [output.outputs[0].text for output in several] for name, several in finish(engine).items()}
    assert outputs == {
        "CUMULATIVE": ["b", "bc", "bcd", "bcde"],
        "DELTA": ["b", "c", "d", "e"],
        "FINAL_ONLY": ["bcde"],
    }


@pytest.mark.parametrize(
    ("prompt", "params", "text", "reason", "stop_reason"),
    [
        ("a", {"stop": "d"}, "bc", "stop", "d"),
        ("a", {"stop": ["zz", "de"]}, "bc", "stop", "de"),
        ("a", {"stop": "d", "include_stop_str_in_output": True}, "bcd", "stop", "d"),
        ("a", {"stop_token_ids": [100]}, "bc", "stop", 100),
        ([254], {}, "\ufffd", "stop", None),  # 255 is not a whole character; then EOS
        ("z", {}, "{|}", "stop", None),  # then the model's second EOS id
        ("z", {"stop_token_ids": [126]}, "{|}", "stop", 126),
        ("z", {"ignore_eos": True, "max_tokens": 5}, "{|}~\x7f", "length", None),
        ("a", {"max_tokens": 1}, "b", "length", None),
        ("a", {"max_tokens": 5, "detokenize": False}, "", "length", None),
    ],
)
def test_stopping(make, prompt, params, text, reason, stop_reason):
    engine = make()
    engine.add_request("r", prompt, SamplingParams(**({"temperature": 0, "max_tokens": 20} | params)))
    [sample] = finish(engine)["r"][-1].outputs
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (text, reason, stop_reason)


def test_generation_ends_at_the_context_limit(make):
    engine = make()
    engine.add_request("r", [1] * 60, SamplingParams(temperature=0, max_tokens=None))
    [sample] = finish(engine)["r"][-1].outputs
    assert (len(sample.token_ids), sample.finish_reason) == (4, "length")


def test_max_tokens_zero_runs_the_prompt_only(make, toy_executors):
    engine = make()
    engine.add_request("r", "abc", PromptOnlyParams(max_tokens=0))
    [sample] = finish(engine)["r"][-1].outputs
    assert (sample.token_ids, sample.finish_reason) == ([], "length")
    assert toy_executors[0].steps == [3]


def test_several_samples(make):
    engine = make()
    engine.add_request("r", "a", SamplingParams(n=3, max_tokens=2, output_kind=RequestOutputKind.FINAL_ONLY))
    [output] = finish(engine)["r"]
    assert [(sample.index, sample.text) for sample in output.outputs] == [(0, "bc"), (1, "bc"), (2, "bc")]
    assert output.finished


def test_more_requests_than_rows(make, toy_executors):
    engine = make(max_num_seqs=2)
    for index in range(7):
        engine.add_request(str(index), chr(97 + index), GREEDY)
    assert texts(finish(engine)) == {str(index): "".join(chr(98 + index + i) for i in range(4)) for index in range(7)}


def test_preemption_changes_nothing(make):
    engine = make(num_gpu_blocks_override=17, max_num_seqs=4)  # 16 blocks of 4 tokens for 4 requests of up to 30
    for index in range(4):
        engine.add_request(str(index), chr(97 + index), SamplingParams(temperature=0, max_tokens=29, ignore_eos=True))
    got = texts(finish(engine))
    assert got == {str(i): bytes(range(98 + i, 98 + i + 29)).decode("utf-8", "replace") for i in range(4)}
    assert engine.engine_core.handle.stats()["num_preemptions"] > 0


def test_abort_midway_gives_a_last_output_and_frees_everything(make):
    engine = make()
    for name in ("kept", "dropped"):
        engine.add_request(name, "a", GREEDY)
    engine.step()
    engine.abort_request("dropped")
    engine.abort_request(["dropped", "never heard of"])
    outputs = finish(engine)
    assert outputs["dropped"][-1].outputs[0].finish_reason == "abort"
    assert outputs["dropped"][-1].finished
    assert texts(outputs)["kept"] == "bcde"
    scheduler = engine.engine_core.core.scheduler
    scheduler.check_invariants()
    assert scheduler.num_unfinished_requests() == 0
    engine.add_request("dropped", "a", GREEDY)  # the id is free again
    assert texts(finish(engine)) == {"dropped": "bcde"}


def test_a_stop_string_leaves_nothing_behind(make):
    engine = make()
    engine.add_request("r", "a", GREEDY.clone(stop="b", max_tokens=30))
    finish(engine)
    assert not engine.engine_core.core.scheduler.has_unfinished_requests()


def test_wrong_requests_harm_no_other(make):
    engine = make()
    engine.add_request("good", "a", GREEDY)
    with pytest.raises(InvalidRequestError, match="'good' belongs to a request that is still running"):
        engine.add_request("good", "b", GREEDY)
    with pytest.raises(InvalidRequestError, match="request_id"):
        engine.add_request("", "b", GREEDY)
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add_request("bad", "", GREEDY)
    with pytest.raises(InvalidRequestError, match="257"):
        engine.add_request("bad", [257], GREEDY)
    assert texts(finish(engine)) == {"good": "bcde"}
    assert engine.get_num_unfinished_requests() == 0


def test_children_never_clash_with_another_request(make):
    engine = make()
    engine.add_request("0_r", "a", GREEDY)
    with pytest.raises(InvalidRequestError, match="'0_r' belongs"):
        engine.add_request("r", "a", SamplingParams(n=2))
    assert list(finish(engine)) == ["0_r"]


def test_a_full_queue_leaves_no_half_request_behind(make):
    engine = make(max_num_queued_reqs=2)
    engine.add_request("one", "a", SamplingParams(max_tokens=1))
    with pytest.raises(QueueFullError):
        engine.add_request("two", "a", SamplingParams(n=2))
    assert list(finish(engine)) == ["one"]
    engine.add_request("two", "a", SamplingParams(n=2, max_tokens=1))
    assert len(finish(engine)["two"][-1].outputs) == 2


def test_a_failed_step_ends_its_own_requests_only(make, toy_executors):
    engine = make(max_num_seqs=1)
    for name in ("first", "second"):
        engine.add_request(name, "a", GREEDY)
    engine.step()
    toy_executors[0].fail_steps = 1
    outputs = finish(engine)
    failed = outputs["first"][-1]
    assert failed.outputs[0].finish_reason == "error"
    assert "boom" in failed.error
    assert texts(outputs)["second"] == "bcde"
    engine.engine_core.core.scheduler.check_invariants()
    engine.add_request("third", "a", GREEDY)
    assert texts(finish(engine)) == {"third": "bcde"}


def test_ctrl_c_in_a_step_reaches_the_caller_and_leaves_the_engine_usable(make, toy_executors):
    engine = make()
    engine.add_request("r", "a", GREEDY)
    toy_executors[0].fail_steps, toy_executors[0].error = 1, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert finish(engine)["r"][-1].outputs[0].finish_reason == "error"
    engine.add_request("again", "a", GREEDY)
    assert texts(finish(engine)) == {"again": "bcde"}


def test_an_engine_that_only_fails_is_given_up(make, toy_executors):
    engine = make(max_num_seqs=1)
    toy_executors[0].fail_steps = 100
    for index in range(5):
        engine.add_request(str(index), "a", GREEDY)
    with pytest.raises(EngineDeadError, match="3 steps in a row failed, the last with RuntimeError: boom"):
        finish(engine)


def test_use_after_shutdown(make, toy_executors):
    engine = make()
    engine.shutdown()
    engine.shutdown()
    assert toy_executors[0].was_shut_down
    for use in (
        engine.step,
        engine.has_unfinished_requests,
        lambda: engine.add_request("r", "a", GREEDY),
        lambda: engine.abort_request("r"),
    ):
        with pytest.raises(EngineDeadError, match="was shut down"):
            use()


def test_a_pool_too_small_says_what_fits(make, toy_executors, monkeypatch):
    from rustvllm.engine import start as engine_start

    real = engine_start.make_executor

    def small(config, _node_secret=None):
        executor = real(config)
        executor.determine_num_blocks = lambda: 5
        return executor

    monkeypatch.setattr(engine_start, "make_executor", small)
    with pytest.raises(ConfigError, match="set max_model_len to 16 or less"):
        make()


def test_two_engines_do_not_know_each_other(make):
    one, two = make(), make()
    one.add_request("r", "a", GREEDY)
    two.add_request("r", "m", GREEDY)
    assert texts(finish(one)) == {"r": "bcde"}
    assert texts(finish(two)) == {"r": "nopq"}


def test_without_a_tokenizer(make):
    engine = make(skip_tokenizer_init=True)
    engine.add_request("r", [97], GREEDY)
    [sample] = finish(engine)["r"][-1].outputs
    assert (sample.text, sample.token_ids) == ("", [98, 99, 100, 101])
    with pytest.raises(ValueError, match="there is no tokenizer"):
        engine.get_tokenizer()


def order_of_first_tokens(engine):
    """Ids of the requests in the order of the steps that gave their first tokens."""
    order = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id not in order and output.outputs and output.outputs[0].token_ids:
                order.append(output.request_id)
    return order


@pytest.mark.parametrize(("policy", "place"), [("fcfs", 20), ("fair", 1)])
def test_a_flood_of_one_tenant_holds_up_no_other(make, policy, place):
    engine = make(scheduling_policy=policy, max_num_seqs=1)
    for number in range(20):
        engine.add_request(f"flood-{number}", "a", GREEDY, tenant=Tenant("flood", user=str(number)))
    engine.add_request("small", "a", GREEDY, tenant=Tenant("small"))
    order = order_of_first_tokens(engine)
    assert len(order) == 21
    assert order.index("small") == place


def test_requests_without_a_tenant_share_one_bucket(make):
    engine = make(scheduling_policy="fair", max_num_seqs=1)
    names = [str(number) for number in range(10)]
    for name in names:
        engine.add_request(name, "a" * (1 + int(name) % 3), GREEDY)
    assert order_of_first_tokens(engine) == names


def test_tenants_go_by_weight(make):
    engine = make(scheduling_policy="fair", max_num_seqs=1)
    for number in range(40):
        engine.add_request(f"one-{number}", "a", GREEDY, tenant=Tenant("one"))
        engine.add_request(f"three-{number}", "a", GREEDY, tenant=Tenant("three", weight=3))
    first = order_of_first_tokens(engine)[:40]
    assert sum(name.startswith("three") for name in first) == 30


def test_what_is_no_tenant(make):
    engine = make()
    with pytest.raises(InvalidRequestError, match="tenant must be a Tenant, got str"):
        engine.add_request("r", "a", GREEDY, tenant="acme")
    for wrong in (0, 1001, True, 1.5, "3"):
        with pytest.raises(InvalidRequestError, match="weight of a tenant must be a whole number from 1 to 1000"):
            Tenant("a", weight=wrong)
    with pytest.raises(InvalidRequestError, match="user of a tenant must be text, got int"):
        Tenant("a", user=5)
    assert "hush" not in repr(Tenant("hush"))
    assert Tenant("a" * 2000).payer == Tenant("a" * 1500).payer != Tenant("a").payer


def test_priority(make, toy_executors):
    engine = make(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in (("late", 5), ("early", -5)):
        engine.add_request(name, "a", GREEDY, priority=priority)
    order = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == ["early", "late"]


def test_the_longest_request_may_be_what_the_kv_cache_holds(make):
    engine = make(max_model_len="auto", num_gpu_blocks_override=4)  # 3 usable blocks of 4 tokens
    assert engine.config.model.max_model_len == engine.input_processor.max_model_len == 12
    with pytest.raises(InvalidRequestError, match="12 tokens"):
        engine.add_request("r", "x" * 12, GREEDY)
    engine.add_request("r", "abcdefghij", GREEDY)
    assert texts(finish(engine)) == {"r": "kl"}
    assert make(max_model_len="auto").config.model.max_model_len == 64
    with pytest.raises(ConfigError, match="set max_model_len to 12 or less"):
        make(num_gpu_blocks_override=4)
