"""``LLM`` over the real core and the toy model: order, checks before anything runs, progress, Ctrl-C, failures."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from rustvllm import LLM, BeamSearchParams, SamplingParams
from rustvllm.exceptions import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    SchedulerStateError,
    WrongThreadError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def changed(params, **values):
    """A copy that was changed after it was checked."""
    copy = params.clone()
    for name, value in values.items():
        setattr(copy, name, value)
    return copy


@pytest.fixture
def make(toy_model, toy_executors):
    made = []

    def build(**changes):
        args = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 8, "block_size": 4}
        made.append(LLM(toy_model, **(args | changes)))
        return made[-1]

    yield build
    for llm in made:
        llm.shutdown()


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", ["bcde"]),
        (["a"], ["bcde"]),
        (["a", "m"], ["bcde", "nopq"]),
        (("a", "m"), ["bcde", "nopq"]),
        ([97, 98], ["cdef"]),
        ([[97], [98, 99]], ["bcde", "defg"]),
        ({"prompt": "a"}, ["bcde"]),
        ({"prompt_token_ids": [97]}, ["bcde"]),
        ([{"prompt_token_ids": [97]}, "m", [97], {"prompt": "x"}], ["bcde", "nopq", "bcde", "yz{|"]),
        (np.array([97, 98]), ["cdef"]),
        (list(np.array([97, 98])), ["cdef"]),
        ((np.int32(97), 98), ["cdef"]),
        ([], []),
    ],
    ids=repr,
)
def test_shapes_of_prompts(make, prompts, expected):
    assert texts(make().generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_results_are_in_input_order_whatever_ends_first(make):
    llm = make(max_num_seqs=3)
    params = [GREEDY.clone(max_tokens=1 + (7 * index) % 11) for index in range(30)]
    outputs = llm.generate([chr(97 + index % 20) for index in range(30)], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + (7 * index) % 11 for index in range(30)]
    assert [output.prompt for output in outputs] == [chr(97 + index % 20) for index in range(30)]


def test_more_prompts_than_may_wait(make):
    llm = make(max_num_queued_reqs=4, max_num_seqs=2)
    assert len(llm.generate(["a"] * 50, GREEDY, use_tqdm=False)) == 50
    params = [SamplingParams(n=1 + index % 4, max_tokens=2) for index in range(20)]
    outputs = llm.generate(["a"] * 20, params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [1 + index % 4 for index in range(20)]
    with pytest.raises(InvalidRequestError, match="n is 5, but at most 4 requests may wait"):
        llm.generate("a", SamplingParams(n=5), use_tqdm=False)


def test_more_tokens_than_may_wait(make):
    llm = make(max_num_queued_tokens=8, max_num_seqs=2)
    prompts = ["a" * (1 + index % 12) for index in range(50)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", "b"], [GREEDY], "sampling_params has 1 entries for 2 prompts"),
        (["a", ""], GREEDY, "prompt 1: the prompt is empty"),
        ("", GREEDY, "the prompt is empty"),
        (["a", [999]], GREEDY, "prompt 1: token id 999"),
        (["a", "b" * 64], GREEDY, "prompt 1: .* 64 input tokens"),
        (["a", "b"], [GREEDY, "greedy"], "prompt 1: sampling_params must be a SamplingParams, got str"),
        (["a", "b"], [], "sampling_params has 0 entries for 2 prompts"),
        ([], [GREEDY], "sampling_params has 1 entries for 0 prompts"),
        (["a", "b"], (GREEDY for _ in "a"), "sampling_params has 1 entries for 2 prompts; give one, or one per prompt"),
        (["a", "b"], (GREEDY for _ in "abcd"), "sampling_params has more than 2 entries for 2 prompts"),
        (["a", "b"], itertools.repeat(GREEDY), "sampling_params has more than 2 entries for 2 prompts"),
        (["a", "b"], (each for each in (GREEDY, "greedy")), "prompt 1: sampling_params must be a SamplingParams, got"),
        ("a", {1}, r"sampling_params must be a SamplingParams or a list of them, got .* \(set\)"),
        ("a", SamplingParams, r"sampling_params must be a SamplingParams or a list of them, got .* \(type\)"),
        ("a", 5, r"sampling_params must be a SamplingParams or a list of them, got 5 \(int\)"),
        ("a", np.array(5), r"sampling_params must be a SamplingParams or a list of them, got 5 \(int\)"),
        ({"prompt": "a"}, {"top_p": 0}, r"must be a SamplingParams or a list of them, got \{'top_p': 0\} \(dict\)"),
        (["a", None], GREEDY, "prompt 1: a prompt must be text, a list of token ids or a dict, got NoneType"),
        ((p for p in ("a", None)), GREEDY, "prompt 1: a prompt must be text, a list of token ids or a dict, got None"),
        (["a", 5], GREEDY, "prompt 1: a prompt must be text, a list of token ids or a dict, got int"),
        ({"a", "b"}, GREEDY, "prompts must be text, token ids, a dict or a list of these, got set"),
        ({"prompt": "a", "promt": "b"}, GREEDY, "a prompt dict may have the keys .*, prompt_token_ids, got promt"),
        (["a", {}], GREEDY, "prompt 1: a prompt dict needs 'prompt' or 'prompt_token_ids'"),
        (np.array([0.5]), GREEDY, "a prompt must be text, a list of token ids or a dict, got float"),
        (np.array(3), GREEDY, "prompts must be text, token ids, a dict or a list of these, got int"),
        (np.zeros((1, 2, 2), dtype=int), GREEDY, "token ids must be integers, got"),
        (np.array([True]), GREEDY, "token ids must be integers, got True"),
        (["a", {"prompt": "b", "cache_salt": "\ud800"}], GREEDY, r"prompt 1: cache_salt .* got '\\ud800'"),
        ("a", changed(GREEDY, max_tokens=0), "max_tokens must be at least 1, got 0"),
        (["a", "b"], [GREEDY, changed(GREEDY, n=0)], "prompt 1: n must be at least 1, got 0"),
        (b"a", GREEDY, "prompts must be text"),
        (5, GREEDY, "prompts must be text"),
        ([True], GREEDY, "must be integers, got True"),
    ],
)
def test_everything_is_checked_before_anything_runs(make, toy_executors, prompts, params, message):
    llm = make()
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert toy_executors[0].steps == []
    assert texts(llm.generate("a", GREEDY, use_tqdm=False)) == ["bcde"]


def test_any_iterable_may_stand_for_a_list(make):
    llm = make()
    lengths = (1, 2, 3)
    params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    prompts = [[4], [4], [4]]

    def generate(given, own):
        outputs = llm.generate(given, own, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == prompts
        return [list(output.outputs[0].token_ids) for output in outputs]

    as_lists = generate(prompts, params)
    assert [len(ids) for ids in as_lists] == list(lengths)
    for given in (tuple(prompts), iter(prompts), (each for each in prompts), np.array(prompts), map(np.array, prompts)):
        for own in (tuple(params), iter(params), (each for each in params), map(SamplingParams.clone, params)):
            assert generate(given, own) == as_lists
            given = prompts if isinstance(given, Iterator) else given  # noqa: PLW2901 -- it gave them once
    llm.enqueue(iter(prompts), iter(params))
    assert [list(output.outputs[0].token_ids) for output in llm.wait_for_completion(use_tqdm=False)] == as_lists
    assert llm.generate([], GREEDY, use_tqdm=False) == llm.generate(iter(()), iter(()), use_tqdm=False) == []


def test_an_entry_of_none_means_the_defaults(make):
    llm = make()
    first, second, third = llm.generate(["a", "a", "a"], [GREEDY, None, None], use_tqdm=False)
    assert len(first.outputs[0].token_ids) == GREEDY.max_tokens
    assert len(second.outputs[0].token_ids) == len(third.outputs[0].token_ids) == SamplingParams().max_tokens


def test_what_a_generator_of_prompts_raises_is_the_callers(make, toy_executors):
    llm = make()

    def prompts():
        yield "a"
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert toy_executors[0].steps == []
    assert texts(llm.generate("a", GREEDY, use_tqdm=False)) == ["bcde"]


def test_priority(make):
    llm = make(scheduling_policy="priority", max_num_seqs=1)
    outputs = llm.generate(["a", "a"], GREEDY, use_tqdm=False, priority=[1, 0])
    assert outputs[1].metrics.finished_time < outputs[0].metrics.finished_time
    outputs = llm.generate(["a", "a"], GREEDY, use_tqdm=False, priority=np.array([1, 0]))
    assert outputs[1].metrics.finished_time < outputs[0].metrics.finished_time
    with pytest.raises(InvalidRequestError, match="priority has 1 entries for 2 prompts"):
        llm.generate(["a", "a"], GREEDY, use_tqdm=False, priority=[1])
    for wrong in (1.5, "high", {0: 1}):
        with pytest.raises(
            InvalidRequestError, match=rf"priority must be an integer or a list of integers, got {wrong!r} \("
        ):
            llm.generate("a", GREEDY, use_tqdm=False, priority=wrong)
    with pytest.raises(InvalidRequestError, match=r"priority must fit into 32 bits, .*, got 1099511627776"):
        llm.generate("a", GREEDY, use_tqdm=False, priority=2**40)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_token_ids": "abc"}, "a prompt of token ids must be a list of integers, got str"),
        ({"prompt_token_ids": ["abc"]}, "a prompt of token ids must be a list of integers, got str"),
        ({"prompt_token_ids": [{"prompt": "a"}]}, "a prompt of token ids must be a list of integers, got dict"),
        ({"prompts": "a", "tokenization_kwargs": ["a"]}, "tokenization_kwargs must be a dict, got list"),
    ],
)
def test_what_is_no_list_of_ids_and_no_dict_is_refused(make, toy_executors, options, says):
    llm = make()
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate(sampling_params=GREEDY, use_tqdm=False, **options)
    assert toy_executors[0].steps == []
    for ids, expected in (([[97], [98]], ["bcde", "cdef"]), ([97, 98], ["cdef"])):
        assert texts(llm.generate(prompt_token_ids=ids, sampling_params=GREEDY, use_tqdm=False)) == expected


def test_a_search_wider_than_the_queue_is_refused_before_anything_runs(make, toy_executors):
    llm = make(max_num_queued_reqs=3)
    params = BeamSearchParams(beam_width=4, max_tokens=3)
    for given in (params, [params]):
        with pytest.raises(InvalidRequestError, match="n is 4, but at most 3 requests may wait"):
            llm.generate(["a"], given, use_tqdm=False)
    assert toy_executors[0].steps == []


def test_all_searches_are_checked_before_the_first_runs(make, toy_executors):
    llm = make()
    with pytest.raises(InvalidRequestError, match="prompt 2: the prompt is empty"):
        llm.beam_search(["a", "b", ""], BeamSearchParams(beam_width=2, max_tokens=3), concurrency_limit=1)
    assert toy_executors[0].steps == []


def test_parameters_may_be_changed_between_calls(make):
    llm = make(override_generation_config={"temperature": 0})
    params = llm.get_default_sampling_params()
    params.max_tokens = 2
    assert texts(llm.generate(["a", "m"], params, use_tqdm=False)) == ["bc", "no"]
    params.max_tokens = 3
    params.stop = ["p"]
    assert texts(llm.generate(["a", "m"], params, use_tqdm=False)) == ["bcd", "no"]
    assert params.stop == ["p"]
    assert llm.get_default_sampling_params().max_tokens == 16


def test_none_means_the_models_defaults(make):
    llm = make(override_generation_config={"temperature": 0, "max_new_tokens": 3})
    assert texts(llm.generate("a", use_tqdm=False)) == ["bcd"]
    assert len(make().generate("a", use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_progress_bar_shows_tokens_per_second(make, capsys):
    llm = make()
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "output: " in shown
    assert "tokens/s" in shown
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert "2/2" not in capsys.readouterr().err


def test_ctrl_c_ends_the_call_and_leaves_the_engine_usable(make, toy_executors):
    llm = make()
    [executor] = toy_executors
    executor.on_step = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 20, GREEDY.clone(max_tokens=50), use_tqdm=False)
    assert len(executor.steps) <= 4
    assert not llm.llm_engine.has_unfinished_requests()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert texts(llm.generate("a", GREEDY, use_tqdm=False)) == ["bcde"]
    llm.llm_engine.engine_core.core.scheduler.check_invariants()


def test_a_handler_that_raises_ends_the_call_with_its_own_error(make, toy_executors):
    def out_of_time(*_):
        raise TimeoutError("the time is up")

    llm = make()
    [executor] = toy_executors
    before = signal.signal(signal.SIGALRM, out_of_time)
    try:
        executor.on_step = lambda step: os.kill(os.getpid(), signal.SIGALRM) if step == 3 else None
        with pytest.raises(TimeoutError, match="the time is up"):
            llm.generate(["a"] * 20, GREEDY.clone(max_tokens=50), use_tqdm=False)
        assert len(executor.steps) <= 4
        assert not llm.llm_engine.has_unfinished_requests()
        executor.on_step = lambda step: signal.signal(signal.SIGALRM, signal.SIG_IGN)
        assert texts(llm.generate("a", GREEDY, use_tqdm=False)) == ["bcde"]
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN, "the program's own change stays"
    finally:
        signal.signal(signal.SIGALRM, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    llm.llm_engine.engine_core.core.scheduler.check_invariants()


def test_a_call_from_another_thread_is_refused_and_takes_nothing_from_the_one_under_way(make, toy_executors):
    llm = make(max_num_queued_reqs=8)
    [executor] = toy_executors
    calls = {
        "generate": lambda: llm.generate("m", GREEDY, use_tqdm=False),
        "beam_search": lambda: llm.beam_search("m", BeamSearchParams(beam_width=2, max_tokens=4)),
        "enqueue": lambda: llm.enqueue("m", GREEDY),
        "wait_for_completion": lambda: llm.wait_for_completion(use_tqdm=False),
        "reset_prefix_cache": llm.reset_prefix_cache,
    }
    refused = []

    def call_all():
        for name, call in calls.items():
            with pytest.raises(WrongThreadError, match="belongs to the thread 'MainThread'"):
                call()
            refused.append(name)

    def in_another_thread():
        other = threading.Thread(target=call_all)
        other.start()
        other.join()

    executor.on_step = lambda step: in_another_thread() if step == 3 else None
    assert texts(llm.generate(["a"] * 40, GREEDY, use_tqdm=False)) == ["bcde"] * 40
    llm.enqueue("x", GREEDY)
    in_another_thread()
    assert texts(llm.wait_for_completion(use_tqdm=False)) == ["yz{|"]
    assert refused == [*calls] * 2


def test_a_call_out_of_a_call_is_refused_and_may_enqueue(make, toy_executors):
    llm = make(max_num_queued_reqs=8)
    [executor] = toy_executors

    def call_again(step):
        if step == 3:
            llm.enqueue("m", GREEDY)
            with pytest.raises(SchedulerStateError, match="a call of this LLM is under way"):
                llm.generate("x", GREEDY, use_tqdm=False)

    executor.on_step = call_again
    assert texts(llm.generate(["a"] * 40, GREEDY, use_tqdm=False)) == ["bcde"] * 40
    assert texts(llm.wait_for_completion(use_tqdm=False)) == ["nopq"]


def test_a_failure_keeps_what_others_gave_and_the_engine(make, toy_executors):
    llm = make(max_num_seqs=1)
    [executor] = toy_executors
    executor.fail_steps = 1
    with pytest.raises(RequestFailedError, match=r"failed on 1 of 3 prompts, first: .*boom") as caught:
        llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert texts(caught.value.outputs)[1:] == ["cdef", "defg"]
    assert texts(llm.generate("a", GREEDY, use_tqdm=False)) == ["bcde"]


def test_a_broken_engine_ends_the_call(make, toy_executors):
    llm = make(max_num_seqs=1)
    toy_executors[0].fail_steps = 10**6
    with pytest.raises(EngineDeadError, match="steps in a row failed"):
        llm.generate(["a"] * 10, GREEDY, use_tqdm=False)


def test_shutdown(make):
    with make() as llm:
        assert texts(llm.generate("a", GREEDY, use_tqdm=False)) == ["bcde"]
    for use in (lambda: llm.generate("a"), lambda: llm.generate([])):
        with pytest.raises(EngineDeadError, match="was shut down"):
            use()


def test_chat(make):
    llm = make()
    messages = [{"role": "user", "content": "ab"}]
    assert texts(llm.chat(messages, GREEDY, use_tqdm=False)) == ["cdef"]
    assert texts(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == ["cdef", "cdef"]
    assert texts(llm.chat(iter(messages), iter([GREEDY]), use_tqdm=False)) == ["cdef"]
    short = SamplingParams(temperature=0, max_tokens=2)
    several = (iter(messages) for _ in range(2))
    assert texts(llm.chat(several, (each for each in (GREEDY, short)), use_tqdm=False)) == ["cdef", "cd"]
    with pytest.raises(InvalidRequestError, match="sampling_params has 1 entries for 2 prompts"):
        llm.chat([messages, messages], iter([GREEDY]), use_tqdm=False)
    for empty in ([], iter(())):
        with pytest.raises(InvalidRequestError, match="messages must be a non-empty list of messages"):
            llm.chat(empty, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="a conversation must be a list of messages, got NoneType"):
        llm.chat([messages, None], GREEDY, use_tqdm=False)
    [output] = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert output.prompt == "ab!"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    [output] = llm.chat(parts, GREEDY, use_tqdm=False)
    assert output.prompt == "a\nb"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (None, "non-empty list"),
        ([[]], "must not be empty"),
        (["hello"], "list of messages, got str"),
        ([["hello"]], r"messages\[0\] must be a dict .* got str"),
        ([{"content": "a"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
        ([{"role": "user"}], "empty prompt"),
        ([{"role": "user", "content": []}], "empty prompt"),
        ([{"role": "user", "content": ""}], "empty prompt"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
    ],
    ids=repr,
)
def test_wrong_conversations_are_refused_as_over_http(make, toy_executors, messages, says):
    llm = make()
    with pytest.raises(InvalidRequestError, match=says) as caught:
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert caught.value.param == "messages"
    assert toy_executors[0].steps == []


def test_chat_template_kwargs_are_variables_of_the_template(make):
    llm = make()
    messages = [{"role": "user", "content": "a"}]
    options = {"use_tqdm": False, "chat_template": "{{ 'think' if thinking else 'no' }}{{ messages[0].content }}"}
    [output] = llm.chat(messages, GREEDY, chat_template_kwargs={"thinking": True}, **options)
    assert output.prompt == "thinka"
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs cannot set messages, tools") as caught:
        llm.chat(messages, GREEDY, chat_template_kwargs={"tools": [], "messages": []}, **options)
    assert caught.value.param == "chat_template_kwargs"


def test_wrong_arguments(toy_model):
    with pytest.raises(TypeError, match="'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(toy_model, max_num_seq=5)
    with pytest.raises(ConfigError, match="cpu_offload_gb=2 is not supported yet"):
        LLM(toy_model, cpu_offload_gb=2)


def test_samples(make):
    [output] = make().generate("a", SamplingParams(n=3, max_tokens=2), use_tqdm=False)
    assert [(sample.index, sample.text) for sample in output.outputs] == [(0, "bc"), (1, "bc"), (2, "bc")]


def test_best_of_returns_the_likeliest_first_and_draws_alike_in_any_company(make):
    llm = make(max_num_seqs=3)
    drawn = llm.generate("a", SamplingParams(n=5, seed=3, max_tokens=4, logprobs=0), use_tqdm=False)[0].outputs
    assert len({sample.cumulative_logprob for sample in drawn}) == 1, "the toy model is sure of what it says"
    [output] = llm.generate("a", SamplingParams(n=2, best_of=5, seed=3, max_tokens=4), use_tqdm=False)
    assert [sample.index for sample in output.outputs] == [0, 1]
    assert [sample.text for sample in output.outputs] == [sample.text for sample in drawn[:2]]
    assert all(sample.logprobs is None for sample in output.outputs)
    assert output.num_unreturned_tokens == 3 * 4


def test_more_samples_than_may_wait_are_refused_before_anything_runs(make):
    llm = make(max_num_queued_reqs=4)
    with pytest.raises(InvalidRequestError, match="best_of is 5, but at most 4 requests may wait") as caught:
        llm.generate("a", SamplingParams(best_of=5), use_tqdm=False)
    assert caught.value.param == "best_of"


def test_a_progress_bar_of_ones_own(make):
    made = []

    class Bar:
        def __init__(self, **arguments):
            made.append((arguments, []))

        def set_postfix_str(self, text, refresh):
            made[-1][1].append(text)

        def update(self):
            made[-1][1].append("update")

        def close(self):
            made[-1][1].append("close")

    make().generate(["a", "b"], GREEDY, use_tqdm=Bar)
    [(arguments, calls)] = made
    assert arguments["total"] == 2
    assert calls[-1] == "close"
    assert calls.count("update") == 2


@pytest.mark.parametrize("name", ["reward", "start_profile", "sleep"])
def test_what_is_not_built_says_so(make, name):
    llm = make()
    with pytest.raises(AttributeError, match=f"LLM.{name} is not supported yet"):
        getattr(llm, name)
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'nothing'"):
        llm.nothing  # noqa: B018 -- the access is the test


def test_chat_renders_parts_tools_and_open_messages(make):
    llm = make()
    show = (
        "{% for m in messages %}{{ m.role }}:"
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | length }} parts{% endif %};{% endfor %}"
        "{{ (tools or [{'function': {'name': ''}}])[0].function.name }}"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    tool = {"type": "function", "function": {"name": "look"}}

    def prompt(messages, **options):
        return llm.chat(messages, GREEDY, use_tqdm=False, chat_template=show, **options)[0].prompt

    assert prompt(parts, chat_template_content_format="string") == "user:a\nb;"
    assert prompt(parts, chat_template_content_format="openai") == "user:2 parts;"
    assert prompt([{"role": "user", "content": "x"}], tools=[tool]) == "user:x;look"
    opened = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert prompt(opened, add_generation_prompt=False, continue_final_message=True) == "user:x;assistant:y"


def test_chat_with_tools_uses_the_models_template_for_tools(make):
    llm = make()
    tokenizer = llm.llm_engine.get_tokenizer()
    tokenizer.chat_template, tokenizer.tool_template = "plain", "with {{ tools | length }} tools"
    messages, tools = [{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "look"}}]
    assert llm.chat(messages, GREEDY, use_tqdm=False)[0].prompt == "plain"
    assert llm.chat(messages, GREEDY, use_tqdm=False, tools=tools)[0].prompt == "with 1 tools"
    own = llm.chat(messages, GREEDY, use_tqdm=False, tools=tools, chat_template="mine")
    assert own[0].prompt == "mine"


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"tools": []}, "tools", "empty list"),
        (
            {"chat_template_content_format": "html"},
            "chat_template_content_format",
            "auto, string or openai, got 'html'",
        ),
        ({"continue_final_message": True}, "continue_final_message", "cannot both be true"),
        ({"chat_template": "{% for %}"}, "chat_template", "not valid"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "messages"),
        ({"lora_request": "adapter"}, "lora_request", "must be a LoRARequest or a list"),
        ({"tools": "look"}, "tools", "must be a list of dicts, got str"),
        ({"tools": {"type": "function"}}, "tools", "must be a list of dicts, got dict"),
        ({"tools": [{"type": "function"}, 5]}, "tools", r"tools\[1\] must be a dict, got int"),
        ({"chat_template": 5}, "chat_template", "must be text, got int"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs", "must be a dict, got list"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt", "must be True or False, got 'no'"),
        ({"continue_final_message": 1}, "continue_final_message", "must be True or False, got 1"),
    ],
)
def test_chat_names_what_is_wrong(make, options, param, says):
    llm = make()
    with pytest.raises(InvalidRequestError, match=says) as caught:
        llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=False, **options)
    assert caught.value.param == param
    assert texts(llm.generate("a", GREEDY, use_tqdm=False)) == ["bcde"]


def test_an_adapter_is_a_lora_request(make):
    llm = make()
    with pytest.raises(InvalidRequestError, match=r"must be a LoRARequest or a list of them, got '.*' \(str\)"):
        llm.generate("a", GREEDY, use_tqdm=False, lora_request="adapter")
    assert texts(llm.generate("a", GREEDY, use_tqdm=False, lora_request=None)) == ["bcde"]


def test_an_output_has_every_field(make):
    llm = make()
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=1)
    with pytest.raises(InvalidRequestError, match="priority"):
        llm.generate(["a"], params, use_tqdm=False, priority=[1, 2])
    [output] = llm.generate(["ab"], GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids, output.finished, output.num_cached_tokens) == (
        "ab",
        [97, 98],
        True,
        0,
    )
    times = output.metrics
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.last_token_time
    assert times.last_token_time <= times.finished_time
    [sample] = output.outputs
    assert (sample.index, sample.text, sample.token_ids) == (0, "cdef", [99, 100, 101, 102])
    assert (sample.finish_reason, sample.stop_reason, sample.logprobs) == ("length", None, None)


@pytest.mark.parametrize("trace", [None, True, False])
def test_trace_given_as_an_argument_overrules_the_environment(monkeypatch, trace):
    monkeypatch.setenv("RUSTVLLM_TRACE", "1")
    with LLM(trace=trace, executor="sim", max_model_len=64, num_gpu_blocks_override=8) as llm:
        assert llm.llm_engine.config.tracing.log == (trace is not False)
