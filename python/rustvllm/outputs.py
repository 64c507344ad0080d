"""What a request gives back: :class:`RequestOutput` with one :class:`CompletionOutput` per sample.

A request for an embedding gives a :class:`PoolingRequestOutput`, or from ``LLM.embed`` an
:class:`EmbeddingRequestOutput`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from rustvllm.logprobs import FlatLogprobs, Logprob, PromptLogprobs

if TYPE_CHECKING:  # importing the package loads no numpy
    import numpy as np
    import numpy.typing as npt


class PromptIds(Protocol):
    """Token ids of a prompt: a list, or the core's own array, which is not copied on its way through the front end."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class AskedAdapter(Protocol):
    """What a caller names an adapter with: a :class:`~rustvllm.lora.request.LoRARequest`."""

    @property
    def lora_name(self) -> str: ...

    @property
    def lora_int_id(self) -> int: ...

    @property
    def lora_path(self) -> str: ...


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of ``time.monotonic``; None while unknown.

    Attributes:
        arrival_time: When the front end got the request, before its prompt was tokenised.
        first_scheduled_time: When a step first ran some of it.
        first_token_time: When its first token was sampled, of any of its samples.
        last_token_time: When its last token so far was sampled.
        finished_time: When it ended.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from its arrival to its first step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request.

    With ``RequestOutputKind.DELTA``, ``text`` and ``token_ids`` hold only what is new since the last output.

    Attributes:
        index: Number of the sample, from 0 to n − 1.
        text: Generated text; empty with ``detokenize=False``.
        token_ids: Generated token ids, with the one that ended the sample.
        cumulative_logprob: Sum of the log-probabilities of all tokens so far; None unless logprobs were asked for, or
            the sample was chosen by it (``best_of``).
        logprobs: For each of ``token_ids``, log-probabilities by token id: the sampled token's, then those of as many
            of the likeliest as were asked for. None unless asked for.
        finish_reason: ``stop``, ``length``, ``abort``, ``repetition`` or ``error``; None while running.
        stop_reason: The stop string or stop token id that ended it, or ``repetition_detected``; None for EOS and for
            every other end.
        text_offsets: For each of ``token_ids``, the characters of the whole text that were certain before it; None
            unless logprobs were asked for.
        lora_request: The adapter that the request asked for; None: the model alone.
        routed_experts, sampling_mask, spec_decode_metrics, weight_versions: Always None; vLLM's, for features that are
            not built.
    """

    routed_experts: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text_offsets: Sequence[int] | None = None
    lora_request: AskedAdapter | None = None

    def finished(self) -> bool:
        """True when this sample has ended."""
        return self.finish_reason is not None

    def extend(self, later: "CompletionOutput") -> None:
        """Add what a later output of the same sample has that is new, as outputs of ``RequestOutputKind.DELTA`` do."""
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        if later.logprobs is not None:
            joined = [*(self.logprobs or ()), *later.logprobs]
            self.logprobs = FlatLogprobs.of(joined) if isinstance(later.logprobs, FlatLogprobs) else joined
        if later.text_offsets is not None:
            self.text_offsets = [*(self.text_offsets or ()), *later.text_offsets]
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """The state of one request after a step.

    Attributes:
        request_id: Name of the request.
        prompt: Prompt text; None when the prompt was given as token ids.
        prompt_ids: Token ids of the prompt, with the special tokens that were added, as the engine keeps them;
            :attr:`prompt_token_ids` is the list of them.
        prompt_logprobs: For each place of the prompt, log-probabilities by token id: its own token's, then
            those of as many of the likeliest as were asked for; the first is None. None unless asked for; shorter than
            the prompt when the request ended before it was computed. With ``RequestOutputKind.DELTA`` in the first
            output only.
        outputs: The samples; with ``RequestOutputKind.DELTA`` only those that changed.
        finished: True when every sample has ended.
        metrics: Times of the request.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        num_accepted_prediction_tokens: Tokens of the request's prediction that were run as drafts and kept so far, of
            all samples.
        num_rejected_prediction_tokens: Those that were run in vain.
        num_unreturned_tokens: Tokens of samples that ``best_of`` had drawn and that are not among ``outputs``.
        num_computed_prompt_tokens: Prompt tokens that are computed, those found in the cache included; set where it has
            news, and only with ``SamplingParams.prompt_progress``.
        prompt_progress_time: When that was so, in seconds of ``time.monotonic``.
        error: Why the request failed, when a sample ended with ``error``.
        lora_request: The adapter that it asked for; None: the model alone.
        pooled: The vector of the prompt, float32 ``[dimensions]``; None unless the request ended with one.
        prompt_token_id_logprobs: Log-probabilities of ``prompt_logprob_token_ids``, float32 ``[num_rows, num_ids]``,
            minus infinity where a row is padded. None unless asked for, and until the prompt is computed; with
            ``RequestOutputKind.DELTA`` in the first output only.
        encoder_prompt, encoder_prompt_token_ids, kv_transfer_params, ec_transfer_params, num_cache_creation_tokens:
            Always None; vLLM's, for features that are not built.
    """

    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None
    num_cache_creation_tokens: ClassVar[None] = None

    request_id: str
    prompt: str | None
    prompt_ids: PromptIds
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptLogprobs | FlatLogprobs | None = None
    prompt_token_id_logprobs: "npt.NDArray[np.float32] | None" = field(default=None, compare=False)
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0
    num_unreturned_tokens: int = 0
    num_computed_prompt_tokens: int | None = None
    prompt_progress_time: float | None = None
    error: str | None = field(default=None)
    lora_request: AskedAdapter | None = None
    pooled: "npt.NDArray[np.float32] | None" = field(default=None, compare=False)

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt as a list, which is made when it is first asked for."""
        if not isinstance(self.prompt_ids, list):
            self.prompt_ids = list(self.prompt_ids)
        return self.prompt_ids

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Merge a later output of the same request into this one.

        Args:
            next_output: Stays as it is.
            aggregate: Both hold only what is new (``RequestOutputKind.DELTA``): put samples together. False: a later
                state of a sample replaces the earlier one.
        """
        self.finished |= next_output.finished
        self.metrics = next_output.metrics or self.metrics
        self.error = next_output.error or self.error
        self.num_cached_tokens = next_output.num_cached_tokens
        if next_output.prompt_logprobs is not None:
            self.prompt_logprobs = next_output.prompt_logprobs
        if next_output.prompt_token_id_logprobs is not None:
            self.prompt_token_id_logprobs = next_output.prompt_token_id_logprobs
        places = {sample.index: place for place, sample in enumerate(self.outputs)}
        for sample in next_output.outputs:
            place = places.get(sample.index)
            if place is None:
                self.outputs.append(replace(sample))
            elif aggregate:
                self.outputs[place].extend(sample)
            else:
                self.outputs[place] = replace(sample)


@dataclass(slots=True)
class PoolingOutput:
    """The vector of a prompt.

    Attributes:
        data: float32 ``[dimensions]``, a numpy array where vLLM has a tensor.
    """

    data: "npt.NDArray[np.float32]"


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding.

    Attributes:
        embedding: Its numbers.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers there are."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass(slots=True)
class PoolingRequestOutput:
    """What a request for a vector gives, once it has ended.

    Attributes:
        request_id: Name of the request.
        outputs: The vector.
        prompt_token_ids: Token ids of the prompt, with the special tokens that were added, after truncation.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        finished: Always True.
        error: Always None: a request that failed raises.
    """

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    error: ClassVar[None] = None

    @classmethod
    def of(cls, output: RequestOutput) -> "PoolingRequestOutput":
        """What a request that ended with a vector gives."""
        assert output.pooled is not None
        vector = PoolingOutput(output.pooled)
        return cls(output.request_id, vector, output.prompt_token_ids, output.num_cached_tokens)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """See :class:`PoolingRequestOutput`; the vector is a list."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    error: ClassVar[None] = None

    @classmethod
    def of(cls, output: RequestOutput) -> "EmbeddingRequestOutput":
        """What a request that ended with a vector gives."""
        assert output.pooled is not None
        embedding = EmbeddingOutput(output.pooled.tolist())
        return cls(output.request_id, embedding, output.prompt_token_ids, output.num_cached_tokens)


@dataclass(slots=True)
class ClassificationOutput:
    """What a prompt was classified as.

    Attributes:
        probs: A probability for each label; without an activation, the numbers that it would be made of.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair of texts.

    Attributes:
        score: A classifier's probability, or the cosine of two embeddings.
    """

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """What a pair of texts gives.

    Attributes:
        request_id: Name of the request; of two embeddings, both names with ``_`` between them.
        outputs: The score.
        prompt_token_ids: Token ids of the pair's prompt; of two embeddings, those of both texts, with the tokenizer's
            padding token between them if it has one.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        finished: Always True.
        error: Always None: a request that failed raises.
    """

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    error: ClassVar[None] = None

    @classmethod
    def of(cls, output: RequestOutput) -> "ScoringRequestOutput":
        """What the request of a pair gives, which ended with one number."""
        assert output.pooled is not None
        score = ScoringOutput(float(output.pooled[0]))
        return cls(output.request_id, score, output.prompt_token_ids, output.num_cached_tokens)

    @classmethod
    def of_two(
        cls, first: RequestOutput, second: RequestOutput, score: float, pad: list[int]
    ) -> "ScoringRequestOutput":
        """What the embeddings of two texts give.

        Args:
            first: The output of one.
            second: That of the other.
            score: Of the two.
            pad: Ids between their token ids.
        """
        ids = [*first.prompt_token_ids, *pad, *second.prompt_token_ids]
        cached = first.num_cached_tokens + second.num_cached_tokens
        return cls(f"{first.request_id}_{second.request_id}", ScoringOutput(score), ids, cached)


@dataclass(slots=True)
class ClassificationRequestOutput:
    """See :class:`PoolingRequestOutput`; the vector is a list of probabilities."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    error: ClassVar[None] = None

    @classmethod
    def of(cls, output: RequestOutput) -> "ClassificationRequestOutput":
        """What a request that ended with a vector gives."""
        assert output.pooled is not None
        probs = ClassificationOutput(output.pooled.tolist())
        return cls(output.request_id, probs, output.prompt_token_ids, output.num_cached_tokens)
