"""Every public name that vLLM 0.32 gives its engines is there, or says why it is not and what works instead."""

import copy
import pickle  # noqa: TID251 -- a user's arguments may be pickled

import numpy as np
import pytest

from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from rustvllm.config.flags import refused
from rustvllm.engine.request.prompts import UNBUILT_KEYS
from rustvllm.engine.unbuilt import METHODS
from rustvllm.exceptions import ConfigError, InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=4)
OF_ENGINE_ARGS = """
    add_cli_args create_diffusion_config create_engine_config create_load_config create_logging_config
    create_model_config create_observability_config create_speculative_config create_structured_outputs_config
    create_watermark_config from_cli_args get_batch_defaults validate_tensorizer_args
"""
OF_LLM = """
    apply_model beam_search chat classify collective_rpc embed encode enqueue enqueue_chat finish_weight_update
    from_engine_args generate get_default_sampling_params get_metrics get_tokenizer get_weight_version get_world_size
    init_weight_transfer_engine input_processor llm_engine model_config release_kv_cache_memory renderer reset_mm_cache
    reset_prefix_cache score shutdown_weight_transfer_engine sleep start_draft_weight_update start_profile
    start_weight_update stop_profile supported_tasks update_weight_version update_weights wait_for_completion wake_up
"""


def is_there_or_refused(engine, name):
    try:
        getattr(engine, name)
    except AttributeError as error:
        return str(error).startswith(f"{type(engine).__name__}.{name} is not supported yet: {METHODS[name]}")
    return True


@pytest.fixture
def llm(toy_model, toy_executors):
    with LLM(toy_model, load_format="dummy", device="cpu", max_num_seqs=4, block_size=4) as made:
        yield made


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_names_of_the_llm(llm):
    assert [name for name in OF_LLM.split() if not is_there_or_refused(llm, name)] == []
    assert not hasattr(llm, "sleep")
    assert llm.model_config is llm.llm_engine.model_config
    assert llm.supported_tasks == ("generate",)
    assert llm.reset_mm_cache() is None
    assert repr(llm).startswith("LLM(model='")


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_methods_of_engine_arguments(kind):
    args = kind(model="m")
    found = {name for name in OF_ENGINE_ARGS.split() if not hasattr(args, name)}
    assert found == refused.METHODS.keys()
    for name in found:
        with pytest.raises(AttributeError) as refusal:
            getattr(args, name)
        assert str(refusal.value) == f"{kind.__name__}.{name} is not supported yet: {refused.METHODS[name]}"
    with pytest.raises(AttributeError, match=f"'{kind.__name__}' object has no attribute 'nothing'"):
        args.nothing  # noqa: B018 -- the access is the test
    assert copy.deepcopy(args) == args
    assert pickle.loads(pickle.dumps(args)) == args


class Failing:
    """A progress bar that fails when it is made, moved or closed."""

    def __init__(self, when):
        self.when = when

    def __call__(self, **_):
        if self.when == "made":
            raise RuntimeError("no bar")
        return self

    def set_postfix_str(self, *_, **__):
        pass

    def update(self):
        if self.when == "moved":
            raise RuntimeError("no bar")

    def close(self):
        if self.when == "closed":
            raise RuntimeError("no bar")


@pytest.mark.parametrize("when", ["made", "moved", "closed"])
def test_a_progress_bar_that_fails_leaves_no_prompts_behind(llm, when):
    with pytest.raises(RuntimeError, match="no bar"):
        llm.generate(["a", "m"], GREEDY, use_tqdm=Failing(when))
    assert not llm.llm_engine.has_unfinished_requests()
    own, seen = llm.enqueue("x", GREEDY), []
    while llm.llm_engine.has_unfinished_requests():
        seen += llm.llm_engine.step()
    assert {output.request_id for output in seen} == set(own), "prompts of the failed call ran"
    assert texts(llm.generate("a", GREEDY, use_tqdm=False)) == ["bcde"]
    llm.enqueue("a", GREEDY)
    with pytest.raises(RuntimeError, match="no bar"):
        llm.wait_for_completion(use_tqdm=Failing(when))
    assert llm.wait_for_completion(use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ((char for char in "am"), ["bcde", "nopq"]),
        (map(str, "am"), ["bcde", "nopq"]),
        ({"a": 1, "m": 2}.keys(), ["bcde", "nopq"]),
        ((ids for ids in ([97], [98, 99])), ["bcde", "defg"]),
        (iter([97, 98]), ["cdef"]),
        (iter(()), []),
        (range(97, 99), ["cdef"]),
        (np.array(["a", "m"]), ["bcde", "nopq"]),
    ],
    ids=["generator", "map", "keys", "generator of ids", "iterator of one", "nothing", "range", "array"],
)
def test_whatever_gives_prompts_in_an_order(llm, prompts, expected):
    assert texts(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize(
    "prompts",
    [{"a", "m"}, frozenset("a"), bytearray(b"a"), None, 5, 5.0, object()],
    ids=["set", "frozenset", "bytearray", "None", "5", "5.0", "object"],
)
def test_what_has_no_order_or_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(InvalidRequestError, match="prompts"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_a_generator_that_fails_queues_nothing(llm):
    def prompts():
        yield "a"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_types_of_outputs_to_wait_for(llm):
    for wanted in (None, RequestOutput, (RequestOutput, dict)):
        llm.enqueue("a", GREEDY)
        assert texts(llm.wait_for_completion(wanted, use_tqdm=False)) == ["bcde"]
    for wrong in (dict, (dict,), (), "RequestOutput"):
        with pytest.raises(TypeError, match="output_type must be RequestOutput"):
            llm.wait_for_completion(wrong, use_tqdm=False)


def test_chat_has_priorities(toy_model, toy_executors):
    with LLM(
        toy_model, load_format="dummy", device="cpu", max_num_seqs=1, block_size=4, scheduling_policy="priority"
    ) as llm:
        talks = [[{"role": "user", "content": "a"}]] * 2
        first, second = llm.chat(talks, GREEDY, False, None, [1, 0], chat_template="{{ messages[0].content }}")
        assert second.metrics.finished_time < first.metrics.finished_time


TALK = [{"role": "user", "content": "a"}]


def test_a_chat_template_of_its_own(toy_model, toy_executors, tmp_path):
    def answers(template, **options):
        with LLM(toy_model, load_format="dummy", device="cpu", block_size=4, chat_template=template) as llm:
            return llm.chat(TALK, GREEDY, use_tqdm=False, **options)[0].prompt

    (tmp_path / "template.jinja").write_text("<{{ messages[0].content }}>")
    assert answers("[{{ messages[0].content }}]") == "[a]"
    assert answers(tmp_path / "template.jinja") == answers(str(tmp_path / "template.jinja")) == "<a>"
    assert answers("[{{ messages[0].content }}]", chat_template="({{ messages[0].content }})") == "(a)"
    num_loaded = len(toy_executors)
    for wrong, message in (
        (tmp_path / "none.jinja", "cannot read chat_template .*none.jinja: No such file"),
        ("a\0b", "cannot read chat_template"),
        (5, "chat_template must be a template or the path of one, got int"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(toy_model, chat_template=wrong)
    with pytest.raises(InvalidRequestError, match="The chat template is not valid"):
        LLM(toy_model, chat_template="{% if %}")
    assert len(toy_executors) == num_loaded, "a model was loaded before the template was read"


@pytest.mark.parametrize("key", UNBUILT_KEYS)
def test_keys_of_prompts_that_are_not_built(llm, key):
    for nothing in (None, {}, []):
        assert texts(llm.generate({"prompt": "a", key: nothing}, GREEDY, use_tqdm=False)) == ["bcde"]
    for wrong in ({"image": 1}, "text", np.ones((2, 2)), 0):
        with pytest.raises(InvalidRequestError, match=f"{key} of a prompt is not supported yet: {UNBUILT_KEYS[key]}"):
            llm.generate({"prompt": "a", key: wrong}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "neutral", "wrong"),
    [
        ("model_weights", "", "s3://bucket"),
        ("reasoning_parser", "", "qwen3"),
        ("enable_mm_processor_stats", False, True),
        ("mamba_config", None, {"backend": "triton"}),
        ("log_config_file", None, "log.json"),
        ("shutdown_timeout", 0, 5),
    ],
)
def test_engine_arguments_that_only_the_server_has_or_that_are_not_built(name, neutral, wrong):
    assert EngineArgs.from_kwargs(**{name: neutral}) == EngineArgs.from_kwargs(**{name: None}) == EngineArgs()
    with pytest.raises(ConfigError, match=f"{name}=.* is not supported yet: "):
        EngineArgs.from_kwargs(**{name: wrong})


def test_arguments_of_the_wrong_type_are_named(llm):
    for wrong in ("yes", None, 1):
        with pytest.raises(InvalidRequestError, match="reset_running_requests must be True or False, got"):
            llm.reset_prefix_cache(wrong)
    with pytest.raises(InvalidRequestError, match="may only have add_special_tokens, got 1, b"):
        llm.generate("a", GREEDY, tokenization_kwargs={"b": 3, 1: 2})
    for key in ("1", True, None, 1.0):
        with pytest.raises(InvalidRequestError, match="logit_bias must map token ids to numbers: a token id must"):
            SamplingParams(logit_bias={key: 1})
    with pytest.raises(TypeError, match=r"LLM\.enqueue_chat\(\) got an unexpected keyword argument 'nothing'"):
        llm.enqueue_chat(TALK, GREEDY, nothing=1)


def test_chats_are_queued_with_their_arguments_by_position(llm):
    llm.enqueue_chat(TALK, GREEDY, False, None, None, "<{{ messages[0].content }}>", "string", False)
    [output] = llm.wait_for_completion(use_tqdm=False)
    assert output.prompt == "<a>"


@pytest.mark.parametrize("name", ["stat_loggers", "on_status_change", "trace"])
@pytest.mark.parametrize("wrong", [5, "x", [5], ["x"]], ids=repr)
def test_callbacks_that_cannot_be_called_are_refused_before_a_model_is_loaded(toy_config, toy_executors, name, wrong):
    with pytest.raises(ConfigError, match=f"{name} must be a"):
        AsyncLLM(toy_config("api_server"), **{name: wrong})
    if name != "trace":  # which an LLMEngine does not have
        with pytest.raises(ConfigError, match=f"{name} must be a"):
            LLMEngine(toy_config("llm_class"), **{name: wrong})
    assert toy_executors == []


def test_ids_to_abort_are_strings(llm):
    engine = llm.llm_engine
    engine.add_request("r", "a", GREEDY)
    for wrong in (None, 5, [None], ["r", 5], [["r"]]):
        with pytest.raises(InvalidRequestError, match="request_id must be a string or several strings, got"):
            engine.abort_request(wrong)
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_request(each for each in ("unknown", "r"))
    assert [output.outputs[0].finish_reason for output in engine.step()] == ["abort"]
