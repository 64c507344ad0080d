"""A case of the conformance suite: one request, what must come of it, and the row of the table that it stands for.

Each case is sent whole and, unless it says otherwise, streamed: both must be refused in the same words, or give the
same choices, ends and counts. Every answer is held to the models of the OpenAPI document.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
from asgi_client import assert_error, events_of, without_nulls

from rustvllm.server.schemas import responses

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Once upon a time"
USER = [{"role": "user", "content": "Tell me a story."}]
MAX_MODEL_LEN = 512
VOCAB_SIZE = 2048

PARAMETERS = (
    "n",
    "temperature",
    "top_p",
    "top_n_sigma",
    "top_k",
    "min_p",
    "presence_penalty, frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens (completions)",
    "max_tokens/max_completion_tokens (chat)",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos, skip_special_tokens, spaces_between_special_tokens, include_stop_str_in_output",
    "logprobs (completions)",
    "logprobs/top_logprobs (chat)",
    "prompt_logprobs",
    "logprob_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "echo (completions)",
    "suffix",
    "best_of",
    "use_beam_search, length_penalty",
    "prompt",
    "prompt_embeds",
    "truncate_prompt_tokens",
    "add_special_tokens",
    "add_generation_prompt / continue_final_message",
    "tools / tool_choice",
    "response_format",
    "structured_outputs",
    "priority",
    "cache_salt",
    "request_id",
    "user, metadata, store, service_tier, unknown fields",
    "vllm_xargs",
)
"""The rows of the table of request parameters."""
OURS = (
    "messages",
    "chat_template / chat_template_kwargs",
    "stream / stream_options",
    "stream_interval",
    "repetition_detection",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "timings / timings_per_token",
    "return_progress",
    "echo (chat)",
    "model",
)
"""What requests have in addition."""
WIRE = (
    "error body",
    "over-long prompt",
    "finish_reason and stop_reason",
    "completions stream",
    "chat stream",
    "usage in streams",
    "interleaved choices",
    "logprobs objects",
    "usage",
    "models",
    "served-model-name",
    "endpoints that are not there",
    "body",
    "tokenize / detokenize",
    "probes",
)
"""The rows of the wire format."""

Check = Callable[[dict[str, Any]], None]


def nothing_more(_answer: dict[str, Any]) -> None:
    """The default check."""


@dataclass(frozen=True)
class Case:
    """One request and its answer.

    Attributes:
        row: Of the tables above.
        kind: Each row has all three, or a reason why not.
        body: Fields besides the prompt, which replace it where they say so.
        url: Endpoint.
        finish: Finish reason of every choice; None: any.
        stop: Stop reason of every choice.
        choices: How many.
        tokens: ``completion_tokens``; None: any number.
        text: Text of the first choice; None: any.
        param: Field that an error blames; None for a case that is served.
        says: Words of the error, the value and the limit among them.
        check: Looks at the whole answer.
        streams: Whether it is sent with ``stream`` as well.
    """

    row: str
    kind: Literal["valid", "edge", "invalid"]
    body: dict[str, Any]
    url: str = COMPLETIONS
    finish: str | None = None
    stop: int | str | None = None
    choices: int = 1
    tokens: int | None = None
    text: str | None = None
    param: str | None = None
    says: tuple[str, ...] = ()
    check: Check = field(default=nothing_more, repr=False)
    streams: bool = True

    def __str__(self) -> str:
        """What the test is called."""
        shown = json.dumps(self.body, ensure_ascii=True)
        return f"{self.row}-{self.kind}-{shown[:60]}".replace("/", "|")

    def request(self) -> dict[str, Any]:
        """The whole body; a seed makes streamed and whole the same."""
        base: dict[str, Any] = {"max_tokens": 4, "seed": 7}
        if self.url == CHAT:
            return {"messages": USER, **base, **self.body}
        return {"prompt": PROMPT, **base, **self.body}


def bad(
    row: str, body: dict[str, Any], param: str | None, *says: str, url: str = COMPLETIONS, streams: bool = True
) -> Case:
    """A request that is refused: for which field, and in which words."""
    return Case(row, "invalid", body, url, param=param, says=says, streams=streams)


def run(case: Case, client: httpx.Client) -> None:
    """Send a case and compare."""
    body = case.request()
    response = client.post(case.url, json=body)
    streams = case.streams and "stream" not in body and "stream_options" not in body
    if case.kind == "invalid":
        assert_error(response, 400, "BadRequestError", param=case.param, says=case.says)
        assert len(response.content) < 2000
        if streams:
            streamed = client.post(case.url, json={**body, "stream": True})
            assert_error(streamed, 400, "BadRequestError", param=case.param, says=case.says)
        return
    assert response.status_code == 200, response.text
    answer = response.json()
    check_shape(case.url, answer)
    check_answer(case, answer)
    case.check(answer)
    if streams:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        joined = join_events(case.url, events_of(client.post(case.url, json={**body, **options})))
        assert joined["choices"] == [summary(choice) for choice in answer["choices"]]
        assert joined["usage"] == without_nulls(answer["usage"])


def check_shape(url: str, answer: dict[str, Any]) -> None:
    """The answer is what the OpenAPI document says."""
    model = responses.ChatCompletionResponse if url == CHAT else responses.CompletionResponse
    model.model_validate(answer, strict=True)
    assert answer["id"].startswith("chatcmpl-" if url == CHAT else "cmpl-")


def check_answer(case: Case, answer: dict[str, Any]) -> None:
    """Choices, ends and counts."""
    choices, usage = answer["choices"], answer["usage"]
    assert [choice["index"] for choice in choices] == list(range(case.choices))
    for choice in choices:
        assert case.finish is None or choice["finish_reason"] == case.finish
        assert choice["stop_reason"] == case.stop
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert case.tokens is None or usage["completion_tokens"] == case.tokens
    assert case.text is None or text_of(choices[0]) == case.text


def text_of(choice: dict[str, Any]) -> str:
    """A choice's text, of either endpoint."""
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def summary(choice: dict[str, Any]) -> dict[str, Any]:
    """What a stream must add up to."""
    role = {"role": choice["message"]["role"]} if "message" in choice else {}
    return {
        **role,
        "index": choice["index"],
        "text": text_of(choice),
        "logprobs": choice["logprobs"],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
    }


def join_events(url: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The events of a stream with usage as one answer, each held to its model and to the rules of its place."""
    model = responses.ChatCompletionChunk if url == CHAT else responses.CompletionChunk
    for event in events:
        model.model_validate(event, strict=True)
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    *others, last = events
    assert last["choices"] == []
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in others)
    choices: dict[int, dict[str, Any]] = {}
    for event in others:
        [part] = event["choices"]
        _join(url, choices, part)
    assert all(choice["finish_reason"] is not None for choice in choices.values())
    return {"choices": [choices[index] for index in sorted(choices)], "usage": last["usage"]}


def _join(url: str, choices: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    index = part["index"]
    if index not in choices:
        choices[index] = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        if url == CHAT:
            assert set(part["delta"]) == {"role", "content"}
            assert part["delta"]["content"] == ""
            choices[index]["role"] = part["delta"]["role"]
    choice = choices[index]
    assert choice["finish_reason"] is None, "nothing comes behind a choice's end"
    choice["text"] += part["delta"].get("content", "") if url == CHAT else part["text"]
    if part["logprobs"] is not None:
        whole = choice["logprobs"] or {name: [] for name in part["logprobs"]}
        choice["logprobs"] = {name: [*values, *part["logprobs"][name]] for name, values in whole.items()}
    choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
