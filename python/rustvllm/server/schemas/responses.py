"""The answers of the endpoints, as pydantic models: for the OpenAPI document, and for tests that hold answers to it.

Nothing is built from them when a request is served. A field with a default is left out of an answer unless something
asks for it; every other one is always there. ``scripts/fuzz_api.py`` holds what the server sends against them, too.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


def absent(description: str | None = None) -> Any:
    """A field that may be absent, which is another thing than null."""
    return Field(default=None, description=description, json_schema_extra=lambda schema: schema.pop("default", None))


FinishReason = Literal["stop", "length", "abort", "repetition"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "abort", "repetition"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)


class PromptTokensDetails(_Answer):
    """With ``--enable-prompt-tokens-details``."""

    cached_tokens: int


class CompletionTokensDetails(_Answer):
    """For a model that thinks, and for a request with a prediction."""

    reasoning_tokens: int = absent(description="Tokens between the marks of the model's thoughts.")
    accepted_prediction_tokens: int = absent(description="Drafts out of the prediction that were kept.")
    rejected_prediction_tokens: int = absent(description="Those that were run in vain.")


class _Counts(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(_Counts):
    """Token counts: each prompt once, whatever ``n`` is; the tokens of all choices."""

    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | None


class ChunkUsage(_Counts):
    """The same in an event."""

    prompt_tokens_details: PromptTokensDetails = absent()
    completion_tokens_details: CompletionTokensDetails = absent()


class AnswerTimings(_Answer):
    """With ``timings``: milliseconds, and tokens per second; null where there is nothing to divide by."""

    cache_n: int = Field(description="Prompt tokens found in the prefix cache.")
    prompt_n: int = Field(description="Prompt tokens that were computed.")
    prompt_ms: float = Field(description="From the first step to the first token.")
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int = Field(description="Tokens generated.")
    predicted_ms: float = Field(description="From the first token to the last.")
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    queue_ms: float = Field(description="From the request's arrival to its first step.")


class PromptProgress(_Answer):
    """With ``return_progress``: how far the prompt of a choice is."""

    total: int
    cache: int = Field(description="Tokens found in the prefix cache.")
    processed: int = Field(description="Tokens computed, those found in the cache included.")
    time_ms: float = Field(description="Since the first step of the prompt.")


class PromptLogprob(_Answer):
    """A candidate for a place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionLogprobs(_Answer):
    """One entry per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class _CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    stop_reason: int | str | None
    token_ids: list[int] | None = Field(description="With `return_token_ids`.")
    prompt_token_ids: list[int] | None = Field(description="With `return_token_ids`.")


class CompletionChoice(_CompletionChoice):
    """One completion of one prompt."""

    finish_reason: FinishReason
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(description="With `prompt_logprobs`.")
    routed_experts: None


class CompletionChunkChoice(_CompletionChoice):
    """What is new of a completion."""

    finish_reason: FinishReason | None


class Embedding(_Answer):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int = Field(description="Which input it is of.")
    embedding: list[float] | str = Field(description="A text with `encoding_format` base64.")


class EmbeddingResponse(_Answer):
    """Answer of ``POST /v1/embeddings``."""

    id: str
    object: Literal["list"]
    created: int = Field(description="Seconds since 1970.")
    model: str
    data: list[Embedding]
    usage: Usage


class Classification(_Answer):
    """What one input was classified as."""

    index: int = Field(description="Which input it is of.")
    label: str | None = Field(description="The name of the label with the largest number.")
    probs: list[float] = Field(description="A probability for each label.")
    num_classes: int


class ClassificationResponse(_Answer):
    """Answer of ``POST /classify``."""

    id: str
    object: Literal["list"]
    created: int = Field(description="Seconds since 1970.")
    model: str
    data: list[Classification]
    usage: Usage


class Score(_Answer):
    """The score of one pair."""

    index: int = Field(description="Which pair it is of.")
    object: Literal["score"]
    score: float


class ScoreResponse(_Answer):
    """Answer of ``POST /score``."""

    id: str
    object: Literal["list"]
    created: int = Field(description="Seconds since 1970.")
    model: str
    data: list[Score]
    usage: Usage


class RankedDocument(_Answer):
    """A document of a request."""

    text: str
    multi_modal: None


class RankedResult(_Answer):
    """A document with its score."""

    index: int = Field(description="Its place in the request.")
    document: RankedDocument = absent("Unless `return_documents` is false.")
    relevance_score: float


class RerankUsage(_Answer):
    """Tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int


class RerankResponse(_Answer):
    """Answer of ``POST /rerank``: the best document first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RankedResult]


class _Header(_Answer):
    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str


class _Whole(_Header):
    usage: Usage
    service_tier: None
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None
    timings: AnswerTimings = absent()


class CompletionResponse(_Whole):
    """Answer of ``POST /v1/completions``: choice prompt · n + i is sample i of that prompt."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class _Chunk(_Header):
    usage: ChunkUsage | None = absent("With `include_usage`: null but at the end.")
    timings: AnswerTimings = absent()
    prompt_progress: PromptProgress = absent()


class CompletionChunk(_Chunk):
    """An event of a streamed completion: one choice, or none and ``usage`` at the end."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice] = Field(max_length=1)


class ChatTokenLogprob(_Answer):
    """A token and its log-probability; ``bytes`` is what counts where the token is part of a character."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class ChatPlace(ChatTokenLogprob):
    """A token of the answer with the likeliest ones at its place."""

    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(_Answer):
    """One entry per token."""

    content: list[ChatPlace]


class CalledFunction(_Answer):
    """A function with its arguments."""

    name: str
    arguments: str = Field(description="JSON text; cut short where the answer is.")


class ToolCall(_Answer):
    """A tool that the model calls."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionDelta(_Answer):
    """A function's name, or more of its arguments."""

    name: str = absent()
    arguments: str


class ToolCallDelta(_Answer):
    """What is new of a call: its id and name first, then pieces of its arguments."""

    index: int
    id: str = absent()
    type: Literal["function"] = absent()
    function: CalledFunctionDelta


class ChatAnswer(_Answer):
    """The assistant's message."""

    role: str = Field(description="As `--response-role` says; that of the last message where that one goes on.")
    content: str | None = Field(description="Null if the message has calls or thoughts alone.")
    reasoning: str | None = Field(description="The model's thoughts.")
    reasoning_content: str = absent("The same under its older name.")
    tool_calls: list[ToolCall] = absent()
    refusal: None
    annotations: None
    audio: None
    function_call: None


class ChatDelta(_Answer):
    """What is new of the assistant's message: its role first, then text, thoughts or calls."""

    role: str = absent()
    content: str = absent()
    reasoning: str = absent()
    reasoning_content: str = absent()
    tool_calls: list[ToolCallDelta] = absent()


class ChatChoice(_Answer):
    """One answer to the conversation."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = Field(description="With `return_token_ids`.")
    routed_experts: None


class ChatChunkChoice(_Answer):
    """What is new of an answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = absent("Ids of the text; null without `return_token_ids`.")


class ChatCompletionResponse(_Whole):
    """Answer of ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(description="With `prompt_logprobs`.")
    prompt_token_ids: list[int] | None = Field(description="With `return_token_ids`.")
    prompt_text: None


class ChatCompletionChunk(_Chunk):
    """An event of a streamed chat completion: one choice, or none and ``usage`` at the end."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice] = Field(max_length=1)
    prompt_token_ids: list[int] | None = absent("In the first event of a choice; null without `return_token_ids`.")
    prompt_text: None = absent("In the first event of a choice.")


class ModelCard(_Answer):
    """A name by which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Any] = Field(max_length=0)
    merged_adapters: list[str] = absent("Folders of the adapters that its weights hold (`--merge-lora`).")


class ModelList(_Answer):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(_Answer):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="With `return_token_strs`.")


class DetokenizeResponse(_Answer):
    """Answer of ``POST /detokenize``."""

    prompt: str


class HealthResponse(_Answer):
    """Answer of ``GET /health``: 200 with ``ok``, else 503."""

    status: Literal["ok", "loading", "stopping", "stalled", "restarting", "dead"]
    message: str = absent()
    engine: int = absent("Rank of the engine that is stalled.")
    seconds: float = absent("For how long it has shown no sign of life.")
    dead_engines: list[int] = absent("Ranks of engines that are gone, while others serve.")


class VersionResponse(_Answer):
    """Answer of ``GET /version``."""

    version: str


class ErrorDetail(_Answer):
    """What was wrong: the message names the value and the limit."""

    message: str
    type: Literal[
        "BadRequestError",
        "NotFoundError",
        "MethodNotAllowedError",
        "UnprocessableEntityError",
        "InternalServerError",
        "NotImplementedError",
        "ServiceUnavailableError",
    ]
    param: str | None = Field(description="The request's field that is to blame.")
    code: int = Field(description="The HTTP status.")


class ErrorResponse(_Answer):
    """Every error but that of a wrong key."""

    error: ErrorDetail


class UnauthorizedResponse(_Answer):
    """A missing or wrong API key."""

    error: str = Field(description="Unauthorized; outside of /v1 also which flag opens a path.")
