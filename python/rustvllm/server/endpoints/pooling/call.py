"""Requests whose prompts end with a vector each: embeddings, classes and scores hand them to the engine alike."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from rustvllm.exceptions import InvalidRequestError
from rustvllm.lora.request import LoRARequest
from rustvllm.sampling_params import PoolingParams
from rustvllm.server.answers.usage import UsageCounter
from rustvllm.server.endpoints.pipeline import tenant_of
from rustvllm.server.errors import UnavailableError
from rustvllm.server.http.front_door import ARRIVAL_NS
from rustvllm.server.schemas.protocol import EmbeddingRequest, PooledRequest
from rustvllm.server.state import ServedModel, ServerState
from rustvllm.server.stream.generation import (
    OF_ONE_PROMPT,
    Generation,
    WrongElementError,
    new_request_id,
    unless_left,
    until_disconnect,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rustvllm.engine.request.prompts import PromptType


@dataclass(frozen=True, slots=True)
class PooledCall:
    """One HTTP request, checked as far as no prompt is needed.

    Attributes:
        state: Of the server.
        name: The model's, or an adapter's, as the client typed it.
        request_id: Of the answer.
        params: Of each prompt.
    """

    state: ServerState
    raw_request: Request
    request: PooledRequest
    name: str
    request_id: str
    params: PoolingParams
    lora_request: LoRARequest | None

    @classmethod
    async def begin(cls, raw_request: Request, request: PooledRequest, task: str, prefix: str) -> "PooledCall":
        """Check the model's name and what it does.

        Args:
            raw_request: What came in.
            request: Its body.
            task: ``embed``, ``classify`` or ``score``.
            prefix: Of the answer's id.

        Raises:
            InvalidRequestError: The engine does something else, or a parameter is wrong.
            UnknownModelError: There is no such model or adapter.
        """
        state: ServerState = raw_request.app.state.server
        model = state.model
        await model.refresh_adapters(request.model)
        name = model.resolve_name(request.model)
        model.check_task(task)
        params = PoolingParams(
            dimensions=request.dimensions if isinstance(request, EmbeddingRequest) else None,
            use_activation=request.use_activation,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            truncation_side=request.truncation_side,
        )
        request_id = new_request_id(prefix, raw_request, request.request_id)
        return cls(state, raw_request, request, name, request_id, params, model.adapter_request(name))

    @property
    def model(self) -> ServedModel:
        """That answers."""
        return self.state.model

    async def run(
        self, prompts: "list[PromptType]", param: str, place_of: Callable[[int], tuple[str, str]] | None = None
    ) -> "tuple[list[npt.NDArray[np.float32]], dict[str, Any]]":
        """The vector of each prompt, and the ``usage`` of all; a client that leaves ends them.

        Args:
            prompts: Each is a request of its own for the engine.
            param: The field that they are made of, which errors name.
            place_of: Gives the field that the prompt with an index comes from, and the place there in words, where that
                is not the element of ``param`` with this index.

        Raises:
            InvalidRequestError: A prompt is wrong.
            QueueFullError: The engine takes no more.
            RequestFailedError: The engine failed on a prompt.
            UnavailableError: Some prompts were aborted.
        """
        try:
            starting = Generation.start(
                self.state,
                self.model,
                prompts,
                self.params,
                self.request_id,
                self.request.priority or 0,
                arrival_ns=self.raw_request.scope[ARRIVAL_NS],
                tenant=tenant_of(self.raw_request, self.request.user),
                lora_request=self.lora_request,
            )
            generation = await unless_left(self.raw_request, starting)
        except InvalidRequestError as error:
            text = str(error)
            is_of_one = isinstance(error, WrongElementError) or (len(prompts) == 1 and error.param in OF_ONE_PROMPT)
            if place_of is not None and is_of_one:
                index, reason = (error.index, error.reason) if isinstance(error, WrongElementError) else (0, text)
                param, place = place_of(index)
                text = f"{place}: {reason}"
            raise InvalidRequestError(text, param if error.param == "prompt" else error.param) from None
        async with aclosing(generation):
            collected = generation.collect(len(prompts), 1)
            outputs, _ = await until_disconnect(self.raw_request.receive, collected)
        vectors = [output.pooled for output in outputs if output.pooled is not None]
        if len(vectors) < len(prompts):  # without those that are missing the others would be of other texts
            raise UnavailableError(
                f"{len(prompts) - len(vectors)} of {len(prompts)} texts were aborted before their vectors were made: "
                "the server is stopping, or a pause of its engine ended them; send the request again.",
                retry_after=5,
            )
        usage = UsageCounter(show_cached=self.state.settings.enable_prompt_tokens_details)
        for index, output in enumerate(outputs):
            usage.add(index, output)
        return vectors, usage.of_whole_answer()


def salted(prompt: "PromptType", salt: str | None) -> "PromptType":
    """A prompt, a text or a dict, that shares cached blocks only with those of its salt."""
    if salt is None:
        return prompt
    made: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)  # type: ignore[arg-type]
    return {**made, "cache_salt": salt}  # type: ignore[return-value]
