"""``echo``: the prompt before each choice's text, and before its log-probabilities those of the prompt."""

import codecs
from typing import Any

from rustvllm.exceptions import InvalidRequestError
from rustvllm.outputs import PromptIds, RequestOutput
from rustvllm.sampling_params import SamplingParams
from rustvllm.server.answers.logprobs import completion_places
from rustvllm.server.schemas.protocol import CompletionRequest, TokenIdList
from rustvllm.server.state import ServedModel

MAX_REPEATED = 1 << 22
"""Most characters and token ids of prompts that one answer repeats, over all its choices."""
MAX_REPEATED_LOGPROBS = 1 << 24
"""Most log-probabilities of prompts that one answer of several choices holds: each is some 75 bytes of JSON."""


def check_repeats(request: CompletionRequest, params: SamplingParams, model: ServedModel) -> None:
    """Refuse an answer that would be long because of its prompts alone: each of ``n`` choices has them once more.

    Raises:
        InvalidRequestError: Names the size and the limit.
    """
    n, prompts = params.n, request.prompt
    size = n * sum(map(len, prompts))
    for name in ("echo", "return_token_ids"):
        if getattr(request, name) and size > MAX_REPEATED:
            raise InvalidRequestError(
                f"{name} would repeat prompts of {size // n} characters or tokens in each of n={n} choices, {size} in "
                f"all; the limit is {MAX_REPEATED}: ask for fewer choices, or leave {name} out.",
                name,
            )
    if params.prompt_logprobs is None or n * len(prompts) == 1:  # the engine has a limit for one prompt
        return
    candidates = model.vocab_size if params.prompt_logprobs == -1 else min(params.prompt_logprobs, model.vocab_size)
    num_places = sum(min(len(prompt), model.max_model_len) for prompt in prompts)
    num_all = n * num_places * (1 + candidates)
    if num_all > MAX_REPEATED_LOGPROBS:
        name = "prompt_logprobs" if request.prompt_logprobs == params.prompt_logprobs else "logprobs"
        raise InvalidRequestError(
            f"{name} with {candidates} candidates for each of {num_places} characters or tokens of prompts, in n={n} "
            f"choices, may be {num_all} log-probabilities; the limit is {MAX_REPEATED_LOGPROBS} in an answer of "
            "several choices: ask for fewer candidates or choices, or send fewer prompts at a time.",
            name,
        )


class PromptEcho:
    """What each choice starts with: the prompt with ``echo``, else nothing.

    Raises:
        InvalidRequestError: ``echo`` without a tokenizer.
    """

    def __init__(self, request: CompletionRequest, model: ServedModel) -> None:
        if request.echo and model.tokenizer is None:
            raise InvalidRequestError("echo needs a tokenizer, but this server runs with skip_tokenizer_init.", "echo")
        self.wanted = bool(request.echo)
        self._num_logprobs = request.logprobs if self.wanted else None
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._prompts: list[str | TokenIdList] = request.prompt
        self._is_whole = request.truncate_prompt_tokens is None
        self._hides_special = request.skip_special_tokens is not False
        self._tokenizer = model.tokenizer
        self._texts: dict[int, str] = {}
        self._logprobs: dict[int, dict[str, Any]] = {}

    def text(self, prompt_index: int, prompt_ids: PromptIds) -> str:
        """The prompt's text as it was sent, or that of the token ids that were left of it."""
        if not self.wanted:
            return ""
        asked = self._prompts[prompt_index]
        if isinstance(asked, str) and self._is_whole:
            return asked
        if prompt_index not in self._texts:
            self._texts[prompt_index] = self._tokenizer.decode(list(prompt_ids), self._hides_special)
        return self._texts[prompt_index]

    def look_at(self, prompt_index: int, output: RequestOutput) -> None:
        """Note the prompt's log-probabilities, which an output brings; its samples' places come after the prompt."""
        if self._num_logprobs is None:
            return
        text = self.text(prompt_index, output.prompt_ids)
        if prompt_index not in self._logprobs:
            self._logprobs[prompt_index] = self._render(text, output)
        for sample in output.outputs:
            sample.text_offsets = [len(text) + offset for offset in sample.text_offsets or ()]

    def logprobs(self, prompt_index: int) -> dict[str, Any] | None:
        """Those of the prompt, as completions show them; None when they were not asked for, or none came."""
        return self._logprobs.get(prompt_index)

    def _render(self, text: str, output: RequestOutput) -> dict[str, Any]:
        ids = output.prompt_token_ids
        places = list(output.prompt_logprobs or ())
        places += [None] * (len(ids) - len(places))  # it ended before they were computed
        tokens = [self._tokenizer.token_bytes(token_id) for token_id in ids]
        assert self._num_logprobs is not None
        return completion_places(
            ids,
            places,
            self._text_offsets(ids, tokens, text),
            self._num_logprobs,
            as_ids=self._as_ids,
            texts=[token.decode(errors="replace") for token in tokens],
        )

    def _text_offsets(self, ids: list[int], tokens: list[bytes], text: str) -> list[int]:
        """Where each token begins in the text, which need not be what the tokens say.

        A tokenizer may have changed it, added special tokens, or put a space before it.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offsets, at = [], 0
        for token_id, token in zip(ids, tokens, strict=True):
            offsets.append(at)
            piece = decoder.decode(token)
            if not text.startswith(piece, at):
                if at == 0 and text.startswith(piece.lstrip(" ")):
                    piece = piece.lstrip(" ")
                elif not self._tokenizer.decode([token_id], self._hides_special):
                    piece = ""  # special, and not shown
            at = min(at + len(piece), len(text))
        return offsets


def joined(first: dict[str, list[Any]] | None, second: dict[str, list[Any]] | None) -> dict[str, list[Any]] | None:
    """Log-probabilities of consecutive places as one object."""
    if first is None or second is None:
        return first or second
    return {name: [*values, *second[name]] for name, values in first.items()}
