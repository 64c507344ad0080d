"""Parameters of sampling through the whole engine, against the reference over the logits that the model gave."""

import sys
from pathlib import Path

import pytest
import torch

from rustvllm import LLM, BatchUpdate, LogitsProcessor, SamplingParams
from rustvllm.exceptions import ConfigError, InvalidRequestError, RequestFailedError
from rustvllm.sampling_params import RequestOutputKind
from rustvllm.sampling_params.table import FILTERS

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "sample"))
import reference

PROMPT = "Once upon a time"
LENGTH = 10


class Record(LogitsProcessor):
    """Follows the rows, adds what ``extra_args`` say, and checks its updates at every step."""

    instance: "Record | None" = None

    @classmethod
    def validate_params(cls, params):
        if (params.extra_args or {}).get("target") == "nowhere":
            raise ValueError("there is no token 'nowhere'")

    def __init__(self, config, device, is_pin_memory):
        assert config.model.vocab_size > 0
        assert device.type == "cpu"
        assert not is_pin_memory
        self.places = {}
        self.num_outputs = {}
        type(self).instance = self

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        if batch_update is None:
            return
        for index in batch_update.removed:
            del self.places[index]
        for index, params, prompt, output in batch_update.added:
            self.places[index] = (params, prompt, output)
        for one, other, how in batch_update.moved:
            a, b = self.places.pop(one), self.places.pop(other, None)
            self.places[other] = a
            assert (b is None) == (how.name == "UNIDIRECTIONAL")
            if b is not None:
                self.places[one] = b
        assert sorted(self.places) == list(range(batch_update.batch_size))

    def apply(self, logits):
        assert logits.shape[0] == len(self.places)
        for index, (params, _, output) in self.places.items():
            if "target" in (params.extra_args or {}):
                # Every other token of the output is the target.
                logits[index, params.extra_args["target"]] += 1e4 * (len(output) % 2)
        return logits


class Warm(LogitsProcessor):
    """Behind the temperature: leaves the likeliest token of those who ask."""

    def __init__(self, config, device, is_pin_memory):
        self.asking = []

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        if batch_update is not None:
            if not hasattr(self, "record"):
                self.record = Record(SimpleConfig, torch.device("cpu"), False)
            self.record.update_state(batch_update)

    def apply(self, logits):
        for index, (params, _, _) in self.record.places.items():
            if (params.extra_args or {}).get("only_best"):
                best = logits[index].argmax()
                logits[index] = -torch.inf
                logits[index, best] = 0
        return logits


class SimpleConfig:
    class model:  # noqa: N801 -- as in a configuration
        vocab_size = 1


@pytest.fixture(scope="module")
def llm():
    return LLM(max_num_seqs=32, max_model_len=128, num_gpu_blocks_override=129)


def generate(llm, *params, prompt=PROMPT):
    outputs = llm.generate([prompt] * len(params), list(params), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def raw_logits(llm, prompt_ids, output):
    """The model's logits at every place of an output, by a run that gets each beginning as its prompt."""
    rows = {}

    def keep(prompt, _, logits):
        rows[len(prompt) - len(prompt_ids)] = logits.tolist()
        return logits

    prompts = [{"prompt_token_ids": [*prompt_ids, *output[:n]]} for n in range(len(output))]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, logits_processors=[keep]), use_tqdm=False)
    return [rows[n] for n in range(len(output))]


CASES = {
    "greedy": {},
    "bias": {"logit_bias": {261: -100, 16: 3.5, 504: 100}},
    "allowed": {"allowed_token_ids": [16, 261, 272, 504, 506, 813, 841]},
    "bad words": {"bad_words": ["little girl called", "Clara", "lived"]},
    # The bias makes an id come again, which the penalties look at.
    "presence": {"presence_penalty": 2.0, "logit_bias": {16: 12.0}},
    "frequency": {"frequency_penalty": 2.0, "logit_bias": {16: 12.0}},
    "repetition": {"repetition_penalty": 1.8},
    "everything": {
        "logit_bias": {16: 2.0, 18: -5.0},
        "bad_words": ["a little", "kitchen"],
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "min_tokens": 5,
        "stop_token_ids": [261],
        "temperature": 1.3,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "seed": 11,
    },
    "min_tokens": {"min_tokens": 8, "stop_token_ids": [16, 261, 504]},
    "min_p": {"temperature": 1.0, "min_p": 0.2, "seed": 1},
    "top_n_sigma": {"temperature": 2.0, "top_n_sigma": 1.5, "seed": 5},
    "top_k": {"temperature": 2.0, "top_k": 7, "seed": 2},
    "top_p": {"temperature": 1.5, "top_p": 0.8, "seed": 3},
    "random": {"temperature": 1.0, "seed": -(2**63)},
    "allowed at random": {"temperature": 2.0, "allowed_token_ids": list(range(100, 140)), "seed": 4},
}


@pytest.fixture(scope="module")
def mixed(llm):
    """Every case, all in one batch."""
    params = [SamplingParams(**{"temperature": 0, "max_tokens": LENGTH} | case) for case in CASES.values()]
    return dict(zip(CASES, zip(params, generate(llm, *params), strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_does_what_the_reference_does(llm, mixed, name):
    params, output = mixed[name]
    tokenizer = llm.llm_engine.get_tokenizer()
    prompt = tokenizer.encode(PROMPT)
    words = [
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for bad in params.bad_words or ()
        for text in (bad, " " + bad)
    ]
    stop_ids = [*params.stop_token_ids, *llm.llm_engine.input_processor.eos_token_ids]
    for place, logits in enumerate(raw_logits(llm, prompt, output)):
        before = output[:place]
        ruled = reference.ruled(
            logits,
            before,
            allowed=params.allowed_token_ids or (),
            bad_words=words,
            stop_ids=stop_ids if place < params.min_tokens else (),
            bias=(params.logit_bias or {}).items(),
        )
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        expected = reference.choose(
            reference.penalised(ruled, prompt, before, *penalties),
            params.temperature,
            params.seed,
            len(prompt) + place,
            **{number.name: getattr(params, number.name) for number in FILTERS},
        )
        assert output[place] == expected, f"at {place} of {output}"
    if name not in {"greedy", "min_tokens"}:
        assert output != mixed["greedy"][1], "the parameter changes nothing"


def test_rules_survive_preemption_and_company(mixed):
    """So few blocks that requests give theirs up: the same tokens, seeds and rules."""
    llm = LLM(max_num_seqs=14, max_model_len=64, block_size=4, num_gpu_blocks_override=30)
    params = [params for params, _ in mixed.values()]
    assert generate(llm, *params) == [output for _, output in mixed.values()]
    assert llm.llm_engine.engine_core.handle.stats()["num_preemptions"] > 0
    alone = [generate(llm, each)[0] for each in params[:8]]
    assert alone == [output for _, output in list(mixed.values())[:8]]


def test_samples_share_the_rules_and_have_seeds_of_their_own(llm):
    rules = {"temperature": 1.5, "max_tokens": LENGTH, "bad_words": ["little girl", "the"], "logit_bias": {16: 5}}
    [output] = llm.generate(PROMPT, SamplingParams(n=4, seed=40, **rules), use_tqdm=False)
    alone = generate(llm, *(SamplingParams(seed=40 + i, **rules) for i in range(4)))
    assert [sample.token_ids for sample in output.outputs] == alone
    assert len({tuple(ids) for ids in alone}) > 1


def test_callables_see_their_own_request_and_end_only_that(llm):
    seen = []

    def two(output, logits):
        seen.append(list(output))
        logits[9] += 1e4 * (len(output) % 2)
        return logits

    def three(prompt, output, logits):
        assert prompt == llm.llm_engine.get_tokenizer().encode(PROMPT)
        return logits + torch.nn.functional.one_hot(torch.tensor(7 + len(output)), len(logits)) * 1e4

    params = SamplingParams(temperature=0, max_tokens=6)
    plain = generate(llm, params)[0]
    by_two, by_three, company = generate(
        llm, params.clone(logits_processors=[two]), params.clone(logits_processors=[three]), params
    )
    assert by_two[1::2] == [9, 9, 9]
    assert by_two[0] == plain[0]
    assert by_three == [7, 8, 9, 10, 11, 12]
    assert company == plain
    assert seen == [by_two[:n] for n in range(6)]


def fails(output, logits):
    if len(output) == 2:
        raise ZeroDivisionError("a user's mistake")
    return logits


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (fails, "ZeroDivisionError: a user's mistake"),
        (lambda output, logits: None, r"must return \d+ logits, got None"),
        (lambda output, logits: logits[:5], r"got torch.float32 \[5\]"),
        (lambda output, logits: logits.argsort(), r"got torch.int64"),
        (lambda logits: logits, "TypeError"),
        (lambda output, logits: torch.full_like(logits, -torch.inf), "no token may follow"),
    ],
)
def test_a_callable_that_fails_harms_its_own_request(llm, call, message):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=0)
    plain = generate(llm, params)[0]
    with pytest.raises(RequestFailedError, match=message) as raised:
        generate(llm, params, params.clone(logits_processors=[call]), params)
    assert [output.error is None for output in raised.value.outputs] == [True, False, True]
    assert [raised.value.outputs[i].outputs[0].token_ids for i in (0, 2)] == [plain, plain]
    assert generate(llm, params)[0] == plain


@pytest.fixture(scope="module")
def processed():
    return LLM(max_num_seqs=3, max_model_len=64, logits_processors=[Record, Warm])


def test_batch_classes_follow_requests_that_come_go_and_move(processed):
    params = [SamplingParams(temperature=0, max_tokens=3 + 5 * (i % 3)) for i in range(9)]
    plain = generate(processed, *params)
    aimed = [each.clone(extra_args={"target": 20 + i}) if i % 2 else each for i, each in enumerate(params)]
    outputs = generate(processed, *aimed)
    for i, output in enumerate(outputs):
        assert len(output) == params[i].max_tokens
        if i % 2:
            assert output[1::2] == [20 + i] * len(output[1::2])
        else:
            assert output == plain[i]
    assert 1 <= len(Record.instance.places) <= 3


def test_a_class_behind_the_temperature(processed):
    params = SamplingParams(temperature=2.0, seed=5, max_tokens=8)
    greedy, best, free = generate(
        processed, SamplingParams(temperature=0, max_tokens=8), params.clone(extra_args={"only_best": True}), params
    )
    assert best == greedy != free


def test_a_class_refuses_a_request(processed):
    with pytest.raises(RequestFailedError, match="Record: there is no token 'nowhere'"):
        generate(processed, SamplingParams(extra_args={"target": "nowhere"}))
    assert len(generate(processed, SamplingParams(max_tokens=2))[0]) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["no_such_module:Class"], "'no_such_module:Class' cannot be imported: ModuleNotFoundError"),
        (["json:NoSuchClass"], "cannot be imported: AttributeError"),
        (["json:JSONDecoder"], "must be a subclass of rustvllm.LogitsProcessor"),
        (["json"], "neither of the form module:Class nor a class"),
        ([print], "pass functions in SamplingParams"),
        ("json:x", "must be a list"),
        ([LogitsProcessor], "cannot be created: TypeError"),
    ],
)
def test_a_class_that_is_none_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        LLM(max_model_len=32, max_num_seqs=1, num_gpu_blocks_override=4, logits_processors=given)


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"logit_bias": {10**6: 1}}, "logit_bias", "1000000, which is not in the vocabulary"),
        ({"allowed_token_ids": [1, 10**6]}, "allowed_token_ids", "1000000, which is not in the vocabulary"),
        ({"bad_words": ["x" * 500]}, "bad_words", "it must have 1 to 128"),
        ({"bad_words": [f"{i}z" for i in range(2100)]}, "bad_words", "the limit is 4096"),
        ({"allowed_token_ids": [261], "bad_words": ["a"]}, "bad_words", "exclude all 1 allowed_token_ids"),
        (
            {"allowed_token_ids": [261], "stop_token_ids": [261], "min_tokens": 2},
            "allowed_token_ids",
            "no token could be sampled before that",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_it_runs(llm, wrong, param, message):
    with pytest.raises(InvalidRequestError, match=message) as raised:
        generate(llm, SamplingParams(**wrong))
    assert raised.value.param == param


def test_greedy_and_final_outputs_alike(llm):
    """What is asked for does not depend on how it is given out."""
    params = SamplingParams(temperature=0, max_tokens=4, logit_bias={9: 100})
    assert generate(llm, params, params.clone(output_kind=RequestOutputKind.FINAL_ONLY)) == [[9] * 4] * 2
