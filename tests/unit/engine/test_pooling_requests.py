"""Requests for vectors as the front end makes them: what the model adds, how texts are cut, the last arithmetic."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rustvllm import PoolingParams, SamplingParams, _core
from rustvllm.config import EngineConfig, ModelConfig
from rustvllm.config.classifier import ClassifierConfig
from rustvllm.config.pooler import PoolerConfig
from rustvllm.engine.input_processor import InputProcessor
from rustvllm.engine.request.pooling import FilledPooling, finished_vector, num_appended_tokens
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import RequestOutputKind

BEGIN, END = 256, 257


class Tokenizer:
    """Bytes, with special tokens before and behind them."""

    eos_token_id = END
    vocab_size = 258
    chat_template = tool_template = None

    def __init__(self, before=(), behind=()):
        self.before, self.behind = list(before), list(behind)

    def encode_ids(self, text, add_special_tokens=True):
        ids = list(text.encode())
        return _core.TokenIds([*self.before, *ids, *self.behind] if add_special_tokens else ids)

    async def encode_off_loop(self, text, add_special_tokens=True):
        return self.encode_ids(text, add_special_tokens)

    def convert_tokens_to_ids(self, token):
        return None

    def convert_ids_to_tokens(self, ids):
        return [chr(token_id) for token_id in ids]


def processor(tokenizer=None, hf_config=None, pooler=PoolerConfig()):  # noqa: B008 -- frozen
    model = ModelConfig(
        model="m", path=Path("/nowhere"), architecture="LlamaForCausalLM", dtype="float32", max_model_len=16,
        vocab_size=258, hidden_size=8, num_layers=1, num_attention_heads=1, num_kv_heads=1, head_dim=8,
        hf_config=hf_config or {}, pooler=pooler,
    )  # fmt: skip
    return InputProcessor(EngineConfig(model=model), tokenizer or Tokenizer())


@pytest.mark.parametrize(
    ("before", "behind"), [((), ()), ((BEGIN,), ()), ((), (END,)), ((BEGIN,), (END,)), ((BEGIN, 1), (2, END))]
)
async def test_a_text_that_is_cut_keeps_what_the_tokenizer_puts_behind_it(before, behind):
    tokenizer = Tokenizer(before, behind)
    assert num_appended_tokens(tokenizer) == len(behind)
    made, whole = processor(tokenizer), [*before, *b"abcdefghij", *behind]
    for keep in (max(1, len(behind)), 6, 9, -1):
        params = PoolingParams(truncate_prompt_tokens=keep)
        size = min(len(whole), 16 if keep == -1 else keep)
        expected = whole if size == len(whole) else [*whole[: size - len(behind)], *behind]
        for request in (
            made.process("abcdefghij", params),
            await made.process_off_loop("abcdefghij", params),
        ):
            assert list(request.prompt_token_ids) == expected
        left = PoolingParams(truncate_prompt_tokens=keep, truncation_side="left")
        assert list(made.process("abcdefghij", left).prompt_token_ids) == whole[len(whole) - size :]
        bare = {"prompt": "abcdefghij", "add_special_tokens": False}
        assert list(made.process(bare, params).prompt_token_ids) == list(b"abcdefghij")[: 10 if keep == -1 else keep]
        ids = {"prompt_token_ids": whole}
        assert list(made.process(ids, params).prompt_token_ids) == whole[:size]
    short = made.process("abcdefghij", PoolingParams(truncate_prompt_tokens=1))
    assert len(short.prompt_token_ids) == 1


def test_a_request_has_the_models_defaults_and_room_for_the_whole_context():
    made = processor(hf_config={"is_matryoshka": True}, pooler=PoolerConfig(use_activation=False, dimensions=4))
    request = made.process([1] * 16, PoolingParams())
    assert request.max_tokens == 0
    assert request.params.output_kind is RequestOutputKind.FINAL_ONLY
    assert (request.params.pooling.use_activation, request.params.pooling.dimensions) == (False, 4)
    own = PoolingParams(use_activation=True, dimensions=2)
    request = made.process([1], own)
    assert (request.params.pooling.use_activation, request.params.pooling.dimensions) == (True, 2)
    own.dimensions = 3
    assert request.params.pooling.dimensions == 2, "later changes do not reach a request"
    with pytest.raises(InvalidRequestError, match="at most 16 fit"):
        made.process([1] * 17, PoolingParams())
    assert made.process([1], PoolingParams()).params.clone().max_tokens == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"task": "score"}, "task must be embed, classify or None"),
        ({"use_activation": 1}, "use_activation must be True or False"),
        ({"skip_reading_prefix_cache": "no"}, "skip_reading_prefix_cache must be True or False"),
        ({"dimensions": 0}, "dimensions must be at least 1"),
        ({"dimensions": 2.0}, "dimensions must be an integer"),
        ({"truncate_prompt_tokens": 0}, "leaves no token"),
        ({"truncate_prompt_tokens": -2}, "at least -1"),
        ({"truncation_side": "up"}, "left or right"),
        ({"step_tag_id": 3}, "step_tag_id is not supported yet"),
        ({"extra_kwargs": {}}, "extra_kwargs is not supported yet"),
        ({"output_kind": RequestOutputKind.DELTA}, "output_kind must be FINAL_ONLY"),
    ],
    ids=range(11),
)
def test_parameters_that_are_wrong(fields, says):
    with pytest.raises(InvalidRequestError, match=says):
        PoolingParams(**fields)
    changed = PoolingParams()
    for name, value in fields.items():
        setattr(changed, name, value)
    with pytest.raises(InvalidRequestError, match=says):
        processor().process([1], changed)


def test_vectors_are_cut_then_normalised():
    numbers = np.array([3.0, 4.0, 12.0, 0.0], np.float32)
    found = finished_vector(numbers.tobytes(), FilledPooling(use_activation=True, dimensions=2))
    np.testing.assert_array_equal(found, np.array([0.6, 0.8], np.float32))
    assert found.dtype == np.float32
    whole = finished_vector(numbers.tobytes(), FilledPooling(use_activation=False))
    np.testing.assert_array_equal(whole, numbers)
    assert whole.flags.writeable
    zeros = finished_vector(np.zeros(4, np.float32).tobytes(), FilledPooling(use_activation=True))
    np.testing.assert_array_equal(zeros, np.zeros(4))
    huge = finished_vector(np.full(4, 1e30, np.float32).tobytes(), FilledPooling(use_activation=True))
    np.testing.assert_array_equal(huge, np.full(4, 0.5, np.float32))


@pytest.mark.parametrize("numbers", [[0.5], [-1.0, 2.0, 0.25], [1e4, -1e4], [-800.0], [3e38, -3e38]], ids=range(5))
def test_numbers_of_labels_become_probabilities(numbers):
    pooled = np.array(numbers, np.float32)
    exact = torch.from_numpy(pooled).double()
    for activation, wanted in (
        ("softmax", torch.softmax(exact, dim=0)),
        ("sigmoid", torch.sigmoid(exact)),
        ("none", exact),
    ):
        asked = FilledPooling(use_activation=True, activation=activation)
        found = finished_vector(pooled.tobytes(), asked)
        np.testing.assert_allclose(found, wanted.float(), atol=1e-7, rtol=0)
        asked.use_activation = False
        np.testing.assert_array_equal(finished_vector(pooled.tobytes(), asked), pooled)


def test_a_request_to_classify_has_the_classifiers_activation_and_no_dimensions():
    classifier = ClassifierConfig(num_labels=2, activation="sigmoid")
    made = processor(pooler=PoolerConfig(classifier=classifier))
    filled = made.process([1], PoolingParams()).params.pooling
    assert (filled.task, filled.activation, filled.use_activation) == ("classify", "sigmoid", True)
    for params, says in (
        (PoolingParams(dimensions=2), "dimensions is for embeddings, but m classifies"),
        (PoolingParams(task="embed"), "m classifies here and makes no embeddings: use LLM.classify or POST /classify"),
        (SamplingParams(), "m classifies here and generates no text: use LLM.classify or POST /classify$"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            made.process([1], params)


def test_scores_come_from_embeddings_and_from_one_label():
    for pooler, says in (
        (PoolerConfig(), None),
        (PoolerConfig(classifier=ClassifierConfig(num_labels=1)), None),
        (PoolerConfig(classifier=ClassifierConfig(num_labels=3)), "a score needs a model with one label, and it has 3"),
        (None, "m generates text here and gives no scores: start the engine with --runner pooling"),
    ):
        model = processor(pooler=pooler)._model
        if says is None:
            model.check_task("score")
            continue
        with pytest.raises(InvalidRequestError, match=says):
            model.check_task("score")


def test_each_engine_says_what_it_does_instead():
    with pytest.raises(InvalidRequestError, match="makes embeddings here") as caught:
        processor().process([1], SamplingParams())
    assert caught.value.param == "model"
    with pytest.raises(InvalidRequestError, match="--runner pooling"):
        processor(pooler=None).process([1], PoolingParams())
