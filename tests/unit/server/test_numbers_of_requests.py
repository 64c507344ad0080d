"""Every whole number and number of every request: ``true`` and ``false`` are none, texts and whole floats are."""

import json

import pytest

from rustvllm import SamplingParams
from rustvllm.exceptions import InvalidRequestError
from rustvllm.server.schemas.messages import CountTokensRequest, MessagesRequest
from rustvllm.server.schemas.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from rustvllm.server.schemas.request_body import parse_request
from rustvllm.server.schemas.responses_request import ResponsesRequest
from rustvllm.server.schemas.scoring import ClassificationRequest, RerankRequest, ScoreRequest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: CHAT,
    ResponsesRequest: {"input": "a"},
    MessagesRequest: {**CHAT, "max_tokens": 5},
    CountTokensRequest: CHAT,
    EmbeddingRequest: {"input": "a"},
    ClassificationRequest: {"input": "a"},
    ScoreRequest: {"text_1": "a", "text_2": "b"},
    RerankRequest: {"query": "a", "documents": ["b"]},
    TokenizeRequest: {"prompt": "a"},
    TokenizeChatRequest: CHAT,
    DetokenizeRequest: {"tokens": [1]},
}


def numbers_of(model):
    """The fields of a request that are numbers or hold some: name, kind of number, and what makes a value of one."""
    schema = model.model_json_schema()

    def kinds(shape, within):
        for one in shape.get("anyOf", [shape]):
            if "$ref" in one:
                target = schema["$defs"][one["$ref"].rpartition("/")[2]]
                for name, inner in target.get("properties", {}).items():
                    yield from kinds(inner, lambda value, name=name, within=within: within({name: value}))
            elif one.get("type") == "array" and "type" in one.get("items", {}):
                yield from kinds(one["items"], lambda value, within=within: within([value]))
            elif one.get("type") in ("integer", "number"):
                yield one["type"], within

    for name, shape in schema["properties"].items():
        if name not in ("prompt", "input"):  # texts or ids, which have a parser of their own
            yield from ((name, *found) for found in kinds(shape, lambda value: value))


FIELDS = [(model, *found) for model in BODIES for found in numbers_of(model)]


def test_the_fields_are_found():
    found = {(model.__name__, name) for model, name, _, _ in FIELDS}
    assert len(found) > 70
    assert found >= {
        ("CompletionRequest", "logprobs"),
        ("CompletionRequest", "stop_token_ids"),
        ("ChatCompletionRequest", "max_completion_tokens"),
        ("ChatCompletionRequest", "repetition_detection"),
        ("ResponsesRequest", "max_output_tokens"),
        ("MessagesRequest", "max_tokens"),
        ("RerankRequest", "top_n"),
        ("EmbeddingRequest", "dimensions"),
        ("DetokenizeRequest", "tokens"),
    }


@pytest.mark.parametrize(("model", "name", "kind", "within"), FIELDS)
def test_a_boolean_is_no_number(model, name, kind, within):
    for value in (True, False):
        body = json.dumps({**BODIES[model], name: within(value)})
        if (model, name, value) == (CompletionRequest, "logprobs", False):  # as chat has it, and older clients send it
            assert parse_request(body.encode(), model).logprobs is None
            continue
        says = rf"input should be a valid {kind}, got {json.dumps(value)}\.$"
        with pytest.raises(InvalidRequestError, match=says) as caught:
            parse_request(body.encode(), model)
        assert caught.value.param == name
    for value in (3, 3.0, "3", "3.0"):
        made = parse_request(json.dumps({**BODIES[model], name: within(value)}).encode(), model)
        assert name in made.model_fields_set
    as_text, as_number = (
        parse_request(json.dumps({**BODIES[model], name: within(value)}).encode(), model) for value in ("3", 3)
    )
    assert getattr(as_text, name) == getattr(as_number, name)


@pytest.mark.parametrize("value", [{"1": True}, {"1": False}])
def test_nor_is_it_a_bias(value):
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        SamplingParams(logit_bias=value)
