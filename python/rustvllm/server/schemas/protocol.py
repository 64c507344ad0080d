"""The requests that the endpoints take, as pydantic models.

A field the models do not know is kept in ``model_extra``: refused if it asks for something that is not built
(``refusals.py``), else ignored with a line in the log. Ranges of sampling parameters are checked by ``SamplingParams``.
"""

from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, WithJsonSchema

from rustvllm.sampling_params import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from rustvllm.sampling_params.repetition_detection import MAX_COUNT
from rustvllm.sampling_params.table import MAX_PATTERN_SIZE, SAMPLING_LISTS, SAMPLING_NUMBERS
from rustvllm.server.schemas.numbers import Float, Int
from rustvllm.text.tokenizer import TokenIds

MAX_CHOICES = 16384
"""Most choices (prompts × n) of one request."""
MAX_INPUTS = 2048
"""Most texts of one request for embeddings, as OpenAI has it."""
MAX_MESSAGES = 8192
"""Most messages of a conversation."""
MAX_FREE_VALUES = 1 << 16
"""Most JSON values of a body in the fields that have no shape of their own: tools, parts, variables, unknown ones."""
MAX_IDS = 1 << 20
"""Most token ids or texts of a field that holds such, over all its prompts."""
MAX_CONTAINERS = 1 << 17
"""Most lists and objects of a body, counted before anything is made of it."""
FEW_IDS = 4096
"""Longer lists of token ids become an array while the body is parsed."""


class _FirstError(FailFast):
    """Stops at a list's first wrong element: a million of them must not cost a million messages.

    Hashable, which pydantic's own class is not and unions of annotated types must be.
    """

    __hash__ = object.__hash__


FIRST_ERROR = _FirstError()
TokenIdList = list[int] | TokenIds
Ids = Annotated[list[Int], FIRST_ERROR]
Strings = Annotated[list[str], FIRST_ERROR]
Objects = Annotated[list[dict[str, Any]], FIRST_ERROR]

PROMPT_SCHEMA = {
    "description": "Text, a list of texts, token ids, or a list of lists of token ids.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ],
}


def _kind(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _is_ids(value: list[Any]) -> bool:
    return set(map(type, value)) == {int}  # one pass in C; bool is a type of its own here


def _compact(ids: list[int], where: str) -> TokenIdList:
    """Many ids as an array: what comes after the parse neither walks through them nor frees them one by one."""
    if len(ids) <= FEW_IDS:
        return ids
    try:
        return TokenIds(ids)
    except ValueError:
        wrong = next(position for position, token_id in enumerate(ids) if not 0 <= token_id < 2**31 - 1)
        raise ValueError(f"{where} {str(ids[wrong])[:32]} at position {wrong}, which is not a token id") from None


def _compact_tokens(ids: list[int]) -> TokenIdList:
    return _compact(ids, "holds")


def parse_prompts(value: Any, limit: int = MAX_CHOICES) -> list[str | TokenIdList]:
    """The four shapes of ``prompt`` as one list of texts and token-id lists.

    Written by hand rather than as a union of types: a wrong element in a list of a million ids must cost one message,
    not a million. Emptiness and the range of ids are checked later, where the tokenizer is known.

    Raises:
        ValueError: Another shape; says which element is wrong.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"must be a string, a list of strings, token ids, or a list of those, not {_kind(value)}")
    if not value:
        raise ValueError("must not be an empty list")
    if _is_ids(value):
        return [_compact(value, "holds")]
    if len(value) > limit:
        raise ValueError(f"has {len(value)} prompts; the limit per request is {limit}")
    prompts: list[str | TokenIdList] = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and (not item or _is_ids(item)):
            prompts.append(_compact(item, f"element {index} holds"))
        elif isinstance(item, list):
            wrong = next(element for element in item if type(element) is not int)
            raise ValueError(f"element {index} must only contain integer token ids, but contains {_kind(wrong)}")
        else:
            raise ValueError(f"element {index} must be a string or token ids, but is {_kind(item)}")
    if len({isinstance(prompt, str) for prompt in prompts}) > 1:
        raise ValueError("must not mix strings and token ids")
    return prompts


def parse_inputs(value: Any) -> list[str | TokenIdList]:
    """The same for ``input`` of an embedding."""
    return parse_prompts(value, MAX_INPUTS)


def _none_if_false(value: Any) -> Any:
    return None if value is False else value


def described(description: str, default: Any = None, **schema: Any) -> Any:
    """A field with what the OpenAPI document says of it; ``schema`` is said there and checked elsewhere."""
    return Field(default=default, description=description, json_schema_extra=schema or None)


def _sampling_number(name: str) -> Any:
    """A field with what the table of sampling parameters says of it."""
    number = SAMPLING_NUMBERS[name]
    limits = {
        "exclusiveMinimum" if number.is_low_excluded else "minimum": number.low,
        "maximum": number.high,
    }
    schema = {key: int(limit) if limit == int(limit) else limit for key, limit in limits.items() if isfinite(limit)}
    return described(number.description, **schema)


def _sampling_list(name: str) -> Any:
    """A field with what the table of lists says of it."""
    row = SAMPLING_LISTS[name]
    schema: dict[str, Any] = {"additionalProperties": {"type": "number"}} if row.kind == "biases" else {}
    return described(row.description, **schema)


def _max_entries(name: str) -> Any:
    """The limit of a list as the table has it, held before an entry is looked at."""
    return Field(max_length=SAMPLING_LISTS[name].max_entries)


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = described("End with an event that has `usage` and no choices.", False)
    continuous_usage_stats: bool | None = described("With `include_usage`: put `usage` into every event.", False)


class RepetitionDetection(BaseModel):
    """Which outputs end because they repeat themselves."""

    model_config = ConfigDict(extra="allow")

    max_pattern_size: Int = described(
        "Most tokens of a pattern; 0: nothing is looked for.", 0, minimum=0, maximum=MAX_PATTERN_SIZE
    )
    min_pattern_size: Int = described(
        "Fewest tokens of a pattern, at most `max_pattern_size`; 0 means 1.", 0, minimum=0, maximum=MAX_PATTERN_SIZE
    )
    min_count: Int = described(
        "How many times in a row the pattern must come, at least 2.", 0, minimum=0, maximum=MAX_COUNT
    )


class GenerationRequest(BaseModel):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = described("A name by which this server serves its model; left out: the first of them.")
    n: Int | None = described("Choices per prompt; greedy sampling allows 1.", minimum=1, maximum=MAX_CHOICES)
    best_of: Int | None = described(
        "Draw so many samples and return the `n` with the highest cumulative log-probability, best first. "
        "`usage` counts all of them. Not with greedy sampling, and in a stream `n` at most.",
        minimum=1,
        maximum=MAX_CHOICES,
    )
    use_beam_search: bool | None = described(
        "Search with `n` beams, at most 64, instead of sampling, and return all of them, best first. Not streamed, and "
        "with nothing that changes the probabilities.",
        False,
    )
    length_penalty: Float | None = described(
        "With `use_beam_search`: the score of a beam is divided by the length of its output to the power of this.",
        1.0,
        minimum=-100,
        maximum=100,
    )
    temperature: Float | None = _sampling_number("temperature")
    top_p: Float | None = _sampling_number("top_p")
    top_k: Int | None = _sampling_number("top_k")
    top_n_sigma: Float | None = _sampling_number("top_n_sigma")
    min_p: Float | None = _sampling_number("min_p")
    presence_penalty: Float | None = _sampling_number("presence_penalty")
    frequency_penalty: Float | None = _sampling_number("frequency_penalty")
    repetition_penalty: Float | None = _sampling_number("repetition_penalty")
    seed: Int | None = described("64 bits; choice i uses seed + i. -1: none.", minimum=-(2**63), maximum=2**63 - 1)
    max_tokens: Int | None = described("Most tokens to generate; clamped to the room behind the prompt.", minimum=0)
    min_tokens: Int | None = described("No end before so many tokens, by EOS or by a stop.", minimum=0)
    stop: str | Annotated[Strings, Field(max_length=MAX_STOP_STRINGS)] | None = described(
        "Strings that end the text, which is cut before them; 64 KiB together."
    )
    stop_token_ids: Annotated[Ids, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = described(
        "Token ids that end the text."
    )
    repetition_detection: RepetitionDetection | None = described(
        "End an output that repeats itself, with the finish reason `repetition`; not before `min_tokens`."
    )
    ignore_eos: bool | None = described("Go on past the end-of-sequence token.")
    include_stop_str_in_output: bool | None = described("Cut behind the stop string.")
    skip_special_tokens: bool | None = described("Leave special tokens out of the text; the default.")
    spaces_between_special_tokens: bool | None = described("Put spaces between special tokens that are shown.")
    logit_bias: Annotated[dict[str, Any], _max_entries("logit_bias")] | None = _sampling_list("logit_bias")
    allowed_token_ids: Annotated[Ids, _max_entries("allowed_token_ids")] | None = _sampling_list("allowed_token_ids")
    bad_words: Annotated[Strings, _max_entries("bad_words")] | None = _sampling_list("bad_words")
    logprob_token_ids: Annotated[Ids, _max_entries("logprob_token_ids")] | None = _sampling_list("logprob_token_ids")
    response_format: dict[str, Any] | None = described(
        'What the answer must be: `{"type": "text"}`, `{"type": "json_object"}`, or '
        '`{"type": "json_schema", "json_schema": {"name", "schema"}}`.'
    )
    structured_outputs: dict[str, Any] | None = described(
        "What the answer must be: one of `json` (a schema), `json_object`, `regex`, `choice`, `grammar` (Lark or GBNF)."
    )
    vllm_xargs: dict[str, Any] | None = described("Arguments for the server's own logits processors.")
    truncate_prompt_tokens: Int | None = described("Keep so many tokens of the prompt; -1: as fit.", minimum=-1)
    truncation_side: Literal["left", "right"] | None = described("Which end is cut off; `left` by default.")
    add_special_tokens: bool | None = described("Let the tokenizer add its beginning-of-sequence token and the like.")
    stream: bool | None = described("Answer with server-sent events.", False)
    stream_options: StreamOptions | None = described("Only with `stream`.")
    stream_interval: Int | None = described(
        "In a stream: tokens per event, if that is more than `--stream-interval`; the first and the last come at once.",
        minimum=1,
    )
    prompt_logprobs: Int | None = described(
        "Candidates to show for each place of the prompt; not with `stream`.", minimum=-1
    )
    return_tokens_as_token_ids: bool | None = described("Show tokens as `token_id:123` in log-probabilities.")
    return_token_ids: bool | None = described("Add `token_ids` to each choice, and `prompt_token_ids`.")
    timings: bool | None = described("Add `timings` to the answer, in a stream to each choice's last event.")
    timings_per_token: bool | None = described("The same, in a stream with every event that has text.")
    return_progress: bool | None = described("In a stream, events with `prompt_progress` while the prompt is computed.")
    priority: Int | None = described("Lower is sooner; needs `--scheduling-policy priority` unless 0.")
    user: str | None = described(
        "With `--scheduling-policy fair`, shares what its API key gets with the key's other users."
    )
    cache_salt: str | None = described(
        "Share cached blocks only with requests of the same salt.", minLength=1, maxLength=128
    )
    request_id: str | None = described("Part of the answer's id; the header `X-Request-Id` wins.", maxLength=256)


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[Any, AfterValidator(parse_prompts), WithJsonSchema(PROMPT_SCHEMA)]
    logprobs: Annotated[Int | None, BeforeValidator(_none_if_false)] = described(
        "Candidates to show for each token besides its own; 0: its own alone.", minimum=-1
    )
    echo: bool | None = described("Begin each choice with the prompt; `max_tokens` may be 0 then.", False)
    suffix: str | None = described("Not supported: a 400 unless empty.", maxLength=0)
    thinking_token_budget: Int | None = described(
        "Most tokens of the model's thoughts, then they are ended; -1: any number.", minimum=-1
    )


class PooledRequest(BaseModel):
    """What requests whose prompts end with a vector have in common: embeddings, classes, scores and ranks."""

    model_config = ConfigDict(extra="allow")

    model: str | None = described("A name by which this server serves its model; left out: the first of them.")
    use_activation: bool | None = described(
        "Normalise embeddings to length 1; make probabilities of a classifier's numbers. The default is the model's."
    )
    truncate_prompt_tokens: Int | None = described("Keep so many tokens of each prompt; -1: as fit.", minimum=-1)
    truncation_side: Literal["left", "right"] | None = described("Which end is cut off; `right` by default.")
    priority: Int | None = described("Lower is sooner; needs `--scheduling-policy priority` unless 0.")
    user: str | None = described(
        "With `--scheduling-policy fair`, shares what its API key gets with the key's other users."
    )
    cache_salt: str | None = described(
        "Share cached blocks only with requests of the same salt.", minLength=1, maxLength=128
    )
    request_id: str | None = described("Part of the answer's id; the header `X-Request-Id` wins.", maxLength=256)


class InputsRequest(PooledRequest):
    """What embeddings and classification have in common: a vector for each input."""

    input: Annotated[Any, AfterValidator(parse_inputs), WithJsonSchema(PROMPT_SCHEMA)]
    add_special_tokens: bool | None = described("Let the tokenizer add its special tokens; the default.")


class EmbeddingRequest(InputsRequest):
    """Body of ``POST /v1/embeddings``."""

    encoding_format: Literal["float", "base64"] | None = described(
        "`float`: a list of numbers; `base64`: float32 numbers, little-endian, as base64.", "float"
    )
    dimensions: Int | None = described(
        "Keep so many numbers; only for models that were trained for it (Matryoshka).", minimum=1
    )


class ChatMessage(BaseModel):
    """One message of a conversation; further fields reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Objects | None = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None


class Conversation(BaseModel):
    """Messages, and how they become a prompt."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[ChatMessage], FIRST_ERROR] = Field(
        max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1}
    )
    tools: Objects | None = described("Functions that the model may call.", minItems=1)
    documents: Objects | None = described("Texts for templates of retrieval models.")
    add_generation_prompt: bool | None = described("End where the assistant's answer begins; the default.")
    continue_final_message: bool | None = described("Leave the last message open and go on with it.")
    chat_template: str | None = described("Jinja template; needs `--trust-request-chat-template`.")
    chat_template_kwargs: dict[str, Any] | None = described("Further variables for the template.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = described(
        "For the chat template; `none`: without thoughts."
    )


class PredictedContent(BaseModel):
    """An answer that the caller expects."""

    model_config = ConfigDict(extra="allow")

    type: Literal["content"]
    content: str | Objects


class ChatCompletionRequest(GenerationRequest, Conversation):
    """Body of ``POST /v1/chat/completions``."""

    max_completion_tokens: Int | None = described("The newer name of `max_tokens`, and wins over it.", minimum=1)
    logprobs: bool | None = described("Show the log-probabilities of the answer's tokens.", False)
    top_logprobs: Int | None = described("Candidates to show for each token; needs `logprobs`.", minimum=-1)
    echo: bool | None = described("Begin each choice with the last message, if the answer has its role.", False)
    tool_choice: str | dict[str, Any] | None = described(
        "`auto` (the default with tools): text or calls; `required`: calls; `none`: text; the type `function`: a call "
        "of this one; the type `allowed_tools`: `auto` or `required` of these."
    )
    prediction: PredictedContent | None = described(
        "What the answer is expected to be: with `--speculative-config` an answer that follows it is faster, and no "
        "token changes."
    )
    parallel_tool_calls: bool | None = described("More than one call; the default.")
    include_reasoning: bool | None = described("Show the model's thoughts; the default.")
    thinking_token_budget: Int | None = described(
        "Most tokens of the model's thoughts, then they are ended; -1: any number.", minimum=-1
    )


class TokenizeRequest(BaseModel):
    """Body of ``POST /tokenize`` with a text; with ``messages`` it is a :class:`TokenizeChatRequest`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class TokenizeChatRequest(Conversation):
    """Body of ``POST /tokenize`` with a conversation."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: Annotated[Ids, AfterValidator(_compact_tokens)]


class LoadAdapterRequest(BaseModel):
    """Body of ``POST /v1/load_lora_adapter``."""

    model_config = ConfigDict(extra="allow")

    lora_name: str | None = None
    lora_path: str | None = Field(
        default=None,
        description="Folder below --lora-root, relative to it or absolute; or owner/name on the hub, with --lora-hub.",
    )
    load_inplace: bool = Field(default=False, description="Read the folder again if an adapter has this name.")


class UnloadAdapterRequest(BaseModel):
    """Body of ``POST /v1/unload_lora_adapter``."""

    model_config = ConfigDict(extra="allow")

    lora_name: str | None = None
