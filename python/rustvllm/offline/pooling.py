"""The calls of ``LLM`` that end with a vector of each prompt: embeddings, classification, and scores of pairs."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rustvllm.engine.llm_engine import LLMEngine
from rustvllm.engine.request.core_request import EngineCoreRequest
from rustvllm.engine.request.pairs import PairPrompts, as_texts, cosines, pairs_of
from rustvllm.engine.request.prompts import PromptType, with_tokenization
from rustvllm.exceptions import InvalidRequestError
from rustvllm.lora.request import LoRARequest, one_for_each
from rustvllm.offline.conversations import Conversations
from rustvllm.offline.prompt_queue import PromptQueue
from rustvllm.offline.prompts import Prompts, as_prompts, params_of_each
from rustvllm.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from rustvllm.parameter_checks import shown
from rustvllm.sampling_params import PoolingParams

Texts = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
AnyPooling = PoolingParams | Sequence[PoolingParams] | None
_TASKS = ("embed", "classify")


class PoolingMethods:
    """See the module.

    Attributes:
        llm_engine: The engine underneath.
    """

    llm_engine: LLMEngine
    _queue: PromptQueue
    _conversations: Conversations
    _pair_prompts: PairPrompts | None = None

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: AnyPooling = None,
        lora_request: Adapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Make an embedding of each prompt, as ``docs/embeddings.md`` describes it; needs ``runner="pooling"``.

        Args:
            prompts: As in ``generate``.
            use_tqdm: As in ``generate``.
            pooling_params: For all prompts, or one for each; None: as the model's configuration says.
            lora_request: As in ``generate``.
            tokenization_kwargs: As in ``generate``.

        Returns:
            One output per prompt, in their order.

        Raises:
            InvalidRequestError: A prompt or parameter is wrong, or the engine does something else; nothing has run.
            RequestFailedError: The engine failed on some prompts.
            EngineDeadError: The engine was shut down or is broken.
        """
        outputs = self._pooled("embed", prompts, use_tqdm, pooling_params, lora_request, tokenization_kwargs)
        return [EmbeddingRequestOutput.of(output) for output in outputs]

    def classify(
        self,
        prompts: Prompts,
        *,
        pooling_params: AnyPooling = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Give a probability for each label of each prompt, as ``docs/scoring.md`` describes it.

        Args:
            prompts: As in ``generate``.
            pooling_params: For all prompts, or one for each; with ``use_activation=False`` the numbers are as the
                model's last layer gives them. None: as the model's configuration says.
            use_tqdm: As in ``generate``.
            lora_request: As in ``generate``.
            tokenization_kwargs: As in ``generate``.

        Returns:
            One output per prompt, in their order.

        Raises:
            InvalidRequestError: As in :meth:`embed`.
            RequestFailedError: The engine failed on some prompts.
            EngineDeadError: The engine was shut down or is broken.
        """
        outputs = self._pooled("classify", prompts, use_tqdm, pooling_params, lora_request, tokenization_kwargs)
        return [ClassificationRequestOutput.of(output) for output in outputs]

    def encode(
        self,
        prompts: Prompts,
        pooling_params: AnyPooling = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Give the vector of each prompt, whatever the engine makes of it.

        Args:
            prompts: As in ``generate``.
            pooling_params: As in :meth:`embed` and :meth:`classify`.
            use_tqdm: As in ``generate``.
            lora_request: As in ``generate``.
            pooling_task: ``embed`` or ``classify``, which must be what the engine does; None: whichever it is.
            tokenization_kwargs: As in ``generate``.

        Returns:
            One output per prompt, in their order.

        Raises:
            InvalidRequestError: As in :meth:`embed`.
            RequestFailedError: The engine failed on some prompts.
            EngineDeadError: The engine was shut down or is broken.
        """
        if pooling_task not in (None, *_TASKS):
            raise InvalidRequestError(
                f"pooling_task must be one of {', '.join(_TASKS)} or None, got {shown(pooling_task)}", "pooling_task"
            )
        outputs = self._pooled(pooling_task, prompts, use_tqdm, pooling_params, lora_request, tokenization_kwargs)
        return [PoolingRequestOutput.of(output) for output in outputs]

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Adapters = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts, as ``docs/scoring.md`` says: by their embeddings, or with a classifier of one label.

        Args:
            data_1: One text for all of ``data_2``, or as many as there are.
            data_2: A text or several.
            use_tqdm: As in ``generate``.
            pooling_params: Of all pairs; None: as the model's configuration says.
            lora_request: The adapter of all texts; or, with a classifier, one (or None) for each pair.
            tokenization_kwargs: As in ``generate``.
            chat_template: Jinja template that makes a classifier's prompt of messages of the roles ``query`` and
                ``document``; None: that of ``LLM(chat_template=...)``, or without one the two texts together.

        Returns:
            One output per pair, in the order of ``data_2``.

        Raises:
            InvalidRequestError: A text or parameter is wrong, or the engine gives no scores; nothing has run.
            RequestFailedError: The engine failed on some pairs.
            EngineDeadError: The engine was shut down or is broken.
        """
        self._queue.check_turn()
        model = self.llm_engine.config.model
        model.check_task("score")
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(
                f"pooling_params must be a PoolingParams, got {type(params).__name__}", "pooling_params"
            )
        pairs = pairs_of(as_texts(data_1, "data_1"), as_texts(data_2, "data_2"), ("data_1", "data_2"))
        if model.task == "classify":
            if self._pair_prompts is None:
                self._pair_prompts = PairPrompts(model, self.llm_engine.tokenizer)
            prompts = self._pair_prompts.make(pairs, params, self._conversations.score_renderer(chat_template))
            outputs = self._pooled("classify", prompts, use_tqdm, params, lora_request, tokenization_kwargs)
            return [ScoringRequestOutput.of(output) for output in outputs]
        if isinstance(lora_request, Sequence):
            raise InvalidRequestError("lora_request must be one adapter: each text is embedded once", "lora_request")
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        outputs = self._pooled("embed", list[PromptType](texts), use_tqdm, params, lora_request, tokenization_kwargs)
        of_text = dict(zip(texts, outputs, strict=True))
        scores = cosines(pairs, {text: output.pooled for text, output in of_text.items()})
        return [
            ScoringRequestOutput.of_two(of_text[first], of_text[second], score, self._padding())
            for (first, second), score in zip(pairs, scores, strict=True)
        ]

    def _padding(self) -> list[int]:
        """What stands between the token ids of two texts."""
        tokenizer = self.llm_engine.get_tokenizer()
        pad = None if tokenizer.pad_token is None else tokenizer.convert_tokens_to_ids(tokenizer.pad_token)
        return [] if pad is None else [pad]

    def _pooled(
        self,
        task: str | None,
        prompts: Prompts,
        use_tqdm: bool | Callable[..., Any],
        pooling_params: AnyPooling,
        lora_request: Adapters,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[RequestOutput]:
        """The last output of each prompt, which ended with a vector."""
        self._queue.check_turn()
        checked = as_prompts(prompts)
        if tokenization_kwargs:
            checked = with_tokenization(checked, tokenization_kwargs)
        requests = self._check_pooled(checked, PoolingParams() if pooling_params is None else pooling_params, task)
        if lora_request is not None:
            requests = self._with_adapters(requests, lora_request)
        return self._queue.run(requests, use_tqdm)

    def _check_pooled(
        self, prompts: list[PromptType], params: PoolingParams | Sequence[PoolingParams], task: str | None
    ) -> list[EngineCoreRequest]:
        every = params_of_each(params, len(prompts), (PoolingParams,), "pooling_params")
        requests = []
        for index, (prompt, own) in enumerate(zip(prompts, every, strict=True)):
            with named_in_errors(index, len(prompts)):
                if not isinstance(own, PoolingParams):
                    raise InvalidRequestError(
                        f"pooling_params must be a PoolingParams, got {type(own).__name__}", "pooling_params"
                    )
                requests.append(self.llm_engine.input_processor.process(prompt, _for_task(own, task)))
        return requests

    def _with_adapters(
        self, requests: list[EngineCoreRequest], given: LoRARequest | Sequence[LoRARequest | None]
    ) -> list[EngineCoreRequest]:
        """Checked requests with the adapters that they ask for, which are loaded."""
        adapters = one_for_each(given, len(requests))
        numbers = self.llm_engine.load_adapters(adapters)
        return [
            dataclasses.replace(request, adapter=number, lora_request=adapter)
            for request, number, adapter in zip(requests, numbers, adapters, strict=True)
        ]


def _for_task(params: PoolingParams, task: str | None) -> PoolingParams:
    """Parameters that ask for a task, which is not another one than they ask for themselves."""
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise InvalidRequestError(f"task of pooling_params is {params.task}, but this call's task is {task}", "task")
    made = params.clone()
    made.task = task
    return made


@contextmanager
def named_in_errors(index: int, num_prompts: int) -> Iterator[None]:
    """Errors say which of several prompts they are about."""
    try:
        yield
    except InvalidRequestError as error:
        if num_prompts == 1:
            raise
        raise InvalidRequestError(f"prompt {index}: {error}", error.param) from error
