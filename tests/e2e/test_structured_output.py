"""Structured output through the whole engine, with a model that has not learnt any: valid, or cut by ``length``."""

import asyncio
import json
import re
import shutil

import pytest

from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, StructuredOutputsParams
from rustvllm.config.hub import embedded_model_path
from rustvllm.engine.core_client import inproc
from rustvllm.engine.grammar_masks import GrammarMasks
from rustvllm.exceptions import InvalidRequestError, RequestFailedError
from rustvllm.sampling_params.structured_outputs import MessageOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "parts"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "it is not known"]
LENGTH = 60
NUM_KINDS = 7


def is_of_schema(text):
    value = json.loads(text)
    return (
        list(value) == ["name", "size", "parts"]
        and len(value["name"]) <= 8
        and value["size"] in ("small", "large")
        and len(value["parts"]) <= 3
        and all(type(part) is int and -5 <= part <= 99 for part in value["parts"])
    )


KINDS = [
    (StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), is_of_schema),
    (StructuredOutputsParams(regex=r"[0-9]{3}-[a-c]{1,4}"), re.compile(r"[0-9]{3}-[a-c]{1,4}").fullmatch),
    (StructuredOutputsParams(choice=CHOICES), CHOICES.__contains__),
    (StructuredOutputsParams(grammar='start: "a" start | "b"'), re.compile("a*b").fullmatch),
    (StructuredOutputsParams(grammar='root ::= "<" [x-z]{2,3} ">"'), re.compile("<[x-z]{2,3}>").fullmatch),
    (StructuredOutputsParams(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    (None, lambda text: True),
]
assert len(KINDS) == NUM_KINDS
PROMPTS = [f"Once upon a time there were {index} mice" for index in range(2 * NUM_KINDS)]
PARAMS = [
    SamplingParams(
        temperature=[1.0, 0.0][index // NUM_KINDS],
        seed=index,
        max_tokens=LENGTH,
        structured_outputs=KINDS[index % NUM_KINDS][0],
    )
    for index in range(2 * NUM_KINDS)
]


def generate(prompts=PROMPTS, params=PARAMS, **options):
    """Texts, token ids and ends, and the scheduler's counters."""
    with LLM(device="cpu", dtype="float32", max_model_len=128, block_size=8, **options) as llm:
        results = llm.generate(prompts, params, use_tqdm=False)
        scheduler = llm.llm_engine.engine_core.core.scheduler
        scheduler.check_invariants()
        samples = [sample for result in results for sample in result.outputs]
        return [(one.text, list(one.token_ids), one.finish_reason) for one in samples], scheduler.stats()


@pytest.fixture(scope="module")
def expected():
    return generate()[0]


def test_what_was_asked_for_is_what_comes(expected):
    free, _ = generate(params=[params.clone(structured_outputs=None) for params in PARAMS])
    num_valid = 0
    for index, ((text, _, finish_reason), (free_text, _, _)) in enumerate(zip(expected, free, strict=True)):
        is_valid = KINDS[index % NUM_KINDS][1]
        if PARAMS[index].structured_outputs is None:
            assert text == free_text
            continue
        assert text != free_text, "the mask forbade something"
        if finish_reason == "stop":
            assert is_valid(text), text
            num_valid += 1
        else:
            assert finish_reason == "length"
    assert num_valid >= NUM_KINDS, "some must have come to their end"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_answers_in_messages_think_freely_and_obey_in_their_last_message(async_scheduling):
    """As gpt-oss answers: some marks are tokens of the model, here those of roles, and the others are spelled."""
    marks = {"<|channel|>": 1, "<|message|>": 2, "<|end|>": 3}
    names = {"<|system|>": "<|channel|>", "<|user|>": "<|message|>", "<|assistant|>": "<|end|>"}
    whole = re.compile(
        r"(?s)((?:<\|channel\|>analysis<\|message\|>(?:(?!<\|end\|>).)*<\|end\|><\|start\|>assistant)*)"
        r"<\|channel\|>final(?: json| <\|constrain\|>json)?<\|message\|>(.+)"
    )
    kinds = [(params, is_valid) for params, is_valid in KINDS if params is not None and not params.json_object]
    asked = [
        SamplingParams(
            seed=seed,
            max_tokens=110,
            logit_bias={3: 6.0},
            skip_special_tokens=False,
            structured_outputs=MessageOutputs(answer=params, marker_ids=marks, begins_within=False),
        )
        for seed, (params, _) in enumerate(kinds)
    ]
    results, stats = generate(PROMPTS[: len(kinds)], asked, async_scheduling=async_scheduling)
    assert stats["num_forced_tokens"] == 0, "a bias takes each token from the model"
    ended, thoughts = 0, []
    for (text, _, finish_reason), (_, is_valid) in zip(results, kinds, strict=True):
        said = re.sub(r"<\|\w+\|>", lambda found: names.get(found[0], found[0]), text)
        assert said.startswith("<|channel|>")
        if finish_reason == "stop":
            read = whole.fullmatch(said)
            assert read, said
            assert is_valid(read[2]), text
            thoughts.append(read[1])
            ended += 1
    assert ended >= 3, results
    assert any("<|message|><|end|>" not in thought for thought in filter(None, thoughts)), "some thought"


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 17, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": 17, "preemption_mode": "swap", "swap_space": 0.05},
        {"num_gpu_blocks_override": 17, "preemption_mode": "recompute", "async_scheduling": True},
    ],
    ids=str,
)
def test_neither_company_nor_overlap_nor_preemption_changes_a_token(expected, options):
    results, stats = generate(**options)
    assert results == expected
    if "preemption_mode" in options:
        assert stats["num_preemptions"] > 0
        assert (stats["num_swapped_out"] > 0) == (options["preemption_mode"] == "swap")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_forced_tokens_are_those_that_the_mask_leaves_without_them(expected, async_scheduling):
    results, stats = generate(async_scheduling=async_scheduling)
    assert results == expected
    assert stats["num_forced_tokens"] > 10
    # Who asks for log-probabilities gets each token from the model.
    sampled, stats_of_sampled = generate(
        params=[params.clone(logprobs=0) for params in PARAMS], async_scheduling=async_scheduling
    )
    assert stats_of_sampled["num_forced_tokens"] == 0
    assert sampled == results
    assert stats["num_generation_tokens"] == stats_of_sampled["num_generation_tokens"]
    sampled, stats_without = generate(structured_outputs_fast_forward=False, async_scheduling=async_scheduling)
    assert (sampled, stats_without["num_forced_tokens"]) == (results, 0)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_go_on_without_a_row_whose_masks_take_long(monkeypatch, async_scheduling):
    properties = {f"property_{index}": {"type": "integer"} for index in range(2000)}
    wanted = StructuredOutputsParams(
        json={"type": "object", "properties": properties, "additionalProperties": False}, disable_any_whitespace=True
    )
    # Penalties count tokens: one that was withheld counts once, when it is drawn.
    slow = SamplingParams(
        max_tokens=30, seed=1, temperature=1.0, structured_outputs=wanted, logprobs=2, presence_penalty=1.5, n=4
    )
    free = [SamplingParams(max_tokens=100, seed=seed, temperature=1.0, ignore_eos=True) for seed in (2, 3)]
    held, released, plain_hold, plain_release = [], [], GrammarMasks.hold_slow, GrammarMasks.release_slow

    def hold_slow(self):
        held.append(plain_hold(self))
        return held[-1]

    def release_slow(self):
        released.append(True)
        plain_release(self)

    monkeypatch.setattr(GrammarMasks, "hold_slow", hold_slow)
    monkeypatch.setattr(GrammarMasks, "release_slow", release_slow)
    with LLM(device="cpu", async_scheduling=async_scheduling) as llm:

        def answers(params):
            outputs = llm.generate(PROMPTS[: len(params)], params)
            samples = [output.outputs for output in outputs]
            for each in (each for sample in samples for each in sample if each.logprobs is not None):
                assert all(token in found for token, found in zip(each.token_ids, each.logprobs, strict=True))
            return [[list(each.token_ids) for each in sample] for sample in samples]

        def num_withheld():
            scheduler = llm.llm_engine.engine_core.core.scheduler
            scheduler.check_invariants()
            return scheduler.stats()["num_withheld_samples"]

        together = answers([slow, *free])
        assert any(held), "their masks are not there when a step is planned, and it goes on"
        held.clear()
        one = slow.clone(n=1)
        [alone] = answers([one])
        assert any(held), "its masks take long"
        assert released, "but nothing else had to wait for them"
        assert together[0][0] == alone[0]
        num_withheld_before = num_withheld()
        assert together[1:] == answers([free[0], *free])[1:]
        assert num_withheld() == num_withheld_before
    assert len(alone[0]) == 30


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_simulated_executor_obeys_too(async_scheduling):
    results, _ = generate(executor="sim", async_scheduling=async_scheduling)
    num_valid = 0
    for index, (text, _, finish_reason) in enumerate(results):
        if PARAMS[index].structured_outputs is not None and finish_reason == "stop":
            assert KINDS[index % NUM_KINDS][1](text), text
            num_valid += 1
    assert num_valid >= NUM_KINDS


def test_samples_of_one_request_each_obey(expected):
    params = SamplingParams(n=4, seed=1, max_tokens=LENGTH, structured_outputs=KINDS[1][0], logprobs=2)
    samples, _ = generate(["Once"], params)
    assert len({text for text, _, _ in samples}) > 1
    assert all(KINDS[1][1](text) and end == "stop" for text, _, end in samples)


def test_a_grammar_that_is_complete_ends_its_request_whatever_else_was_asked_for():
    params = [
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, structured_outputs=StructuredOutputsParams(choice=["yes"])),
        SamplingParams(max_tokens=LENGTH, min_tokens=30, structured_outputs=StructuredOutputsParams(choice=["yes"])),
    ]
    results, _ = generate(["Once", "Twice"], params)
    assert [(text, end) for text, _, end in results] == [("yes", "stop")] * 2


def test_ignore_eos_goes_on_while_anything_else_may_follow():
    params = SamplingParams(
        max_tokens=LENGTH, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="[ab]+")
    )
    [(text, token_ids, end)], _ = generate(["Once"], params)
    assert (end, len(token_ids)) == ("length", LENGTH)
    assert set(text) <= {"a", "b"}


def test_what_cannot_be_enforced_is_refused_and_harms_no_other_request(expected):
    with LLM(device="cpu", dtype="float32", max_model_len=128, block_size=8) as llm:
        for wanted, what in [
            (
                StructuredOutputsParams(json={"properties": {"a": {"not": {}}}}, strict=True),
                "/properties/a/not is not supported",
            ),
            (StructuredOutputsParams(json='{"type": "string", "enum": ["\\ud800"]}'), "not valid JSON"),
            (StructuredOutputsParams(json={"enum": ["\ud800"]}), "not valid JSON"),
            (StructuredOutputsParams(regex="\ud800"), "valid Unicode"),
            (StructuredOutputsParams(regex="(?<=a)b"), "invalid regex"),
            (StructuredOutputsParams(choice=["a"] * 50_000), None),
            (StructuredOutputsParams(json={"enum": ["\0"]}), None),
            (
                StructuredOutputsParams(
                    json={"type": "string", "x-guidance": {"lenient": True}, "contains": {}}, strict=True
                ),
                "/contains",
            ),
        ]:
            params = SamplingParams(max_tokens=2, structured_outputs=wanted)
            if what is None:
                assert llm.generate("Once", params, use_tqdm=False)
                continue
            with pytest.raises(InvalidRequestError, match=what) as refused:
                llm.generate("Once", params, use_tqdm=False)
            assert refused.value.param == "structured_outputs"
        results = llm.generate(PROMPTS[:NUM_KINDS], PARAMS[:NUM_KINDS], use_tqdm=False)
        assert [result.outputs[0].text for result in results] == [text for text, _, _ in expected[:NUM_KINDS]]


def test_a_grammar_that_other_rules_leave_no_token_says_so_and_harms_no_other_request(expected):
    yes, digits = StructuredOutputsParams(choice=["yes"]), StructuredOutputsParams(regex="[0-9]+")
    with LLM(device="cpu", dtype="float32", max_model_len=128, block_size=8) as llm:
        ids = llm.get_tokenizer().encode("7", add_special_tokens=False)
        rules = [
            {"structured_outputs": yes, "allowed_token_ids": ids},
            {"structured_outputs": yes, "allowed_token_ids": ids, "temperature": 0.0},
            {"structured_outputs": yes, "bad_words": ["yes", "ye", "y"], "logprobs": 1},
        ]
        emptied = [SamplingParams(max_tokens=4, seed=1, **rule) for rule in rules]
        with pytest.raises(
            RequestFailedError, match=r"failed on 3 of 10 prompts, .*: no token may follow: the grammar"
        ) as failed:
            llm.generate(["Once"] * 3 + PROMPTS[:NUM_KINDS], emptied + PARAMS[:NUM_KINDS], use_tqdm=False)
        results = failed.value.outputs[3:]
        assert [result.outputs[0].text for result in results] == [text for text, _, _ in expected[:NUM_KINDS]]
        both = SamplingParams(max_tokens=4, seed=1, structured_outputs=digits, allowed_token_ids=ids)
        assert llm.generate("Once", both, use_tqdm=False)[0].outputs[0].text == "7777"


def test_a_tokenizer_that_has_gone_is_named_in_the_log_and_harms_no_other_request(tmp_path, caplog):
    shutil.copytree(embedded_model_path(), tmp_path / "model")
    params = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="[0-9]+"))
    with LLM(str(tmp_path / "model"), device="cpu", dtype="float32", max_model_len=128, block_size=8) as llm:
        shutil.rmtree(tmp_path / "model")
        with pytest.raises(RequestFailedError, match="could not be compiled"):
            llm.generate("Once", params, use_tqdm=False)
        assert llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids
    [said] = [record.getMessage() for record in caplog.records if "structured output" in record.getMessage()]
    assert f"the tokenizer of {tmp_path / 'model'} cannot be read now: " in said


BEHIND_E = {"type": "tag", "begin": "e", "content": {"type": "const_string", "value": "12345"}, "end": "!"}


@pytest.mark.parametrize(
    "tag",
    [
        {"structures": [{"begin": "e", "schema": {"enum": [12345]}, "end": "!"}], "triggers": ["e"]},
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["e"], "tags": [BEHIND_E]}},
    ],
    ids=["structures", "format"],
)
def test_a_structural_tag_holds_what_stands_behind_its_trigger(tag):
    params = [
        SamplingParams(
            max_tokens=60, seed=seed, temperature=1.0, structured_outputs=StructuredOutputsParams(structural_tag=tag)
        )
        for seed in range(8)
    ]
    with LLM(device="cpu", dtype="float32", max_model_len=128, block_size=8) as llm:
        texts = [result.outputs[0].text for result in llm.generate(["Once upon"] * 8, params, use_tqdm=False)]
    num_tags = sum(text.count("e12345!") for text in texts)
    assert num_tags > 0, "a trigger came"
    for text in texts:
        rest = text.replace("e12345!", "")
        assert "e" not in rest or "e12345!".startswith(rest[rest.index("e") :]), text


def test_a_grammar_that_compiles_for_long_does_not_end_the_engine(monkeypatch):
    monkeypatch.setattr(inproc, "_GRAMMAR_WAIT", 0.001)
    properties = {f"name {index * 0.618 % 1}": {"type": "integer"} for index in range(1000)}
    params = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(json={"properties": properties}))
    with LLM(device="cpu", dtype="float32", max_model_len=128, block_size=8) as llm:
        waits = 0
        is_compiling = llm.llm_engine.engine_core.is_compiling

        def count():
            nonlocal waits
            waits += is_compiling()
            return is_compiling()

        monkeypatch.setattr(llm.llm_engine.engine_core, "is_compiling", count)
        [result] = llm.generate("Once", params, use_tqdm=False)
    assert waits > 10, "it was waited for"
    assert result.outputs[0].finish_reason == "length"


async def test_an_engine_in_a_process_of_its_own_gives_the_same(expected, monkeypatch):
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", "1")
    arguments = AsyncEngineArgs(device="cpu", dtype="float32", max_model_len=128, block_size=8)
    engine = AsyncLLM.from_engine_args(arguments)
    try:

        async def text_of(index):
            outputs = engine.generate(PROMPTS[index], PARAMS[index], f"request {index}")
            return [output async for output in outputs][-1].outputs[0].text

        texts = await asyncio.gather(*map(text_of, range(len(PROMPTS))))
    finally:
        engine.shutdown()
    assert texts == [text for text, _, _ in expected]
