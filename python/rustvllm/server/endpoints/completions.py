"""``POST /v1/completions``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from rustvllm.exceptions import InvalidRequestError
from rustvllm.outputs import CompletionOutput, PromptIds, RequestOutput
from rustvllm.sampling_params import SamplingParams
from rustvllm.server.answers import nulls
from rustvllm.server.answers.logprobs import completion_logprobs, shown_prompt_logprobs
from rustvllm.server.answers.prompt_echo import PromptEcho, check_repeats, joined
from rustvllm.server.endpoints.pipeline import Face, Run, respond
from rustvllm.server.endpoints.sampling import DEFAULT_COMPLETION_MAX_TOKENS
from rustvllm.server.schemas.protocol import CompletionRequest, TokenIdList
from rustvllm.server.schemas.refusals import COMPLETION_REFUSALS
from rustvllm.server.stream.chunks import ChunkRenderer

if TYPE_CHECKING:
    from rustvllm.engine.request.prompts import TextPrompt, TokensPrompt


async def create_completion(raw_request: Request) -> Response:
    """Continue one or several prompts."""
    return await respond(raw_request, CompletionFace)


class CompletionFace(Face[CompletionRequest]):
    """Prompts that go on."""

    shape = CompletionRequest
    refusals = COMPLETION_REFUSALS
    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"
    text_frame = (b',"text":', b"")
    chunk_nulls = b',"prompt_token_ids":null'
    answer_nulls = nulls.COMPLETION_ANSWER
    choice_nulls = nulls.COMPLETION_CHOICE

    @property
    def num_prompts(self) -> int:
        return len(self.request.prompt)

    def max_tokens(self) -> tuple[int | None, str]:
        request, param = self.request, "max_tokens"
        if request.max_tokens is None:
            return min(DEFAULT_COMPLETION_MAX_TOKENS, self.model.max_model_len), param
        if request.max_tokens < (0 if request.echo else 1):
            hint = "" if request.echo else " (0 is allowed with echo only)"
            raise InvalidRequestError(
                f"max_tokens must be at least {0 if request.echo else 1}, got {request.max_tokens}{hint}.", param
            )
        return request.max_tokens, param

    def num_logprobs(self) -> int | None:
        self.logprobs = completion_logprobs(self.request)
        return self.request.logprobs

    def echoed_logprobs(self) -> int | None:
        request = self.request
        if not request.echo or request.logprobs is None:
            return None
        if request.use_beam_search:
            raise InvalidRequestError(
                "logprobs with echo cannot be used with use_beam_search, because beam search computes no "
                "log-probabilities of the prompt: leave one of them out.",
                "logprobs",
            )
        return request.logprobs

    def as_sent(self, error: InvalidRequestError) -> InvalidRequestError:
        request = self.request
        params: SamplingParams | None = getattr(self, "params", None)  # None: they could not be made
        if error.param != "prompt_logprobs" or params is None or request.prompt_logprobs == params.prompt_logprobs:
            return error
        return InvalidRequestError(f"echo and logprobs={request.logprobs} ask for {error}", "logprobs")

    def check(self) -> None:
        if self.request.thinking_token_budget is not None:
            self.params = replace(self.params, thinking_token_budget=self.request.thinking_token_budget)
        check_repeats(self.request, self.params, self.model)
        self._echo = PromptEcho(self.request, self.model)

    async def prompts(self, run: Run) -> list["TextPrompt | TokensPrompt"]:  # noqa: ARG002
        return [self._prompt(prompt) for prompt in self.request.prompt]

    def _prompt(self, prompt: str | TokenIdList) -> "TextPrompt | TokensPrompt":
        request = self.request
        made: TextPrompt | TokensPrompt
        if isinstance(prompt, str):
            made = {"prompt": prompt, "add_special_tokens": request.add_special_tokens is not False}
        else:
            made = {"prompt_token_ids": prompt}
        if request.cache_salt is not None:
            made["cache_salt"] = request.cache_salt
        return made

    def opening(self, chunks: ChunkRenderer, prompt_index: int, prompt_ids: PromptIds) -> bytes:
        text = self._echo.text(prompt_index, prompt_ids)
        ids = list(prompt_ids) if self.request.return_token_ids else None
        logprobs, first = self._echo.logprobs(prompt_index), prompt_index * self.params.n
        if not text and logprobs is None and ids is None:
            return b""
        return chunks.echo(range(first, first + self.params.n), text, logprobs, ids)

    def look_at(self, prompt_index: int, output: RequestOutput) -> None:
        self._echo.look_at(prompt_index, output)

    def choice(self, prompt_index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        logprobs = None if self.logprobs is None else self.logprobs(sample)
        return {
            "text": self._echo.text(prompt_index, output.prompt_ids) + sample.text,
            "logprobs": joined(self._echo.logprobs(prompt_index), logprobs) if logprobs else None,
        }

    def add_prompt_facts(self, answer: dict[str, Any], outputs: Sequence[RequestOutput]) -> None:
        request, n = self.request, self.params.n
        for index, output in enumerate(outputs):
            facts: dict[str, Any] = {}
            if request.return_token_ids:
                facts["prompt_token_ids"] = output.prompt_token_ids
            if request.prompt_logprobs is not None:
                facts["prompt_logprobs"] = shown_prompt_logprobs(
                    request, output.prompt_token_ids, output.prompt_logprobs
                )
            for choice in answer["choices"][index * n : (index + 1) * n]:
                choice.update(facts)
