"""Pairs of texts: which goes with which, the prompt that a classifier reads of both, and the score of two vectors."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from rustvllm import _core
from rustvllm.config import ModelConfig
from rustvllm.engine.request.core_request import pooling_params
from rustvllm.engine.request.pooling import filled_params
from rustvllm.engine.request.prompts import PromptIds, PromptType, TokensPrompt
from rustvllm.exceptions import InvalidRequestError, ModelLoadError
from rustvllm.parameter_checks import is_valid_unicode, shown
from rustvllm.sampling_params import PoolingParams
from rustvllm.text.pair_template import PairTemplate, read_pair_template
from rustvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rustvllm.text.chat_renderer import ChatRenderer

MAX_PAIR_CHARS: Final = 1 << 25
"""Most characters of all pairs of a request, each text counted as often as it is in a pair."""
_OFF_LOOP_CHARS: Final = 2048
"""Longer texts are tokenised in a thread of the core."""
_LONG_ORDER_CHARS: Final = 1 << 16
"""Longer pairs are made into an order for the template's process in a thread."""
_MANY_IDS: Final = 1 << 14
"""Longer pairs of ids are joined in a thread."""
_TURN_SECONDS: Final = 0.001
_RENDERED_AT_ONCE: Final = 16
"""Pairs that wait for the template's process at a time."""
_SMALLEST: Final = 1e-8
"""A smaller product of two lengths counts as this, as in torch's ``cosine_similarity``."""

Pairs = Sequence[tuple[str, str]]


def as_texts(given: object, name: str) -> list[str]:
    """One text or several, as a list.

    Args:
        given: A text, ``{"text": ...}``, ``{"content": [{"type": "text", "text": ...}]}``, or a list of these.
        name: Of the field, for messages.

    Raises:
        InvalidRequestError: It is something else.
    """
    if isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray):
        return [_as_text(item, f"{name} element {index}", name) for index, item in enumerate(given)]
    return [_as_text(given, name, name)]


def _as_text(given: object, place: str, name: str) -> str:
    text = given
    if isinstance(given, Mapping):
        text = given.get("text")
        parts = given.get("content")
        if text is None and isinstance(parts, Sequence) and len(parts) == 1 and isinstance(parts[0], Mapping):
            text = parts[0].get("text") if parts[0].get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequestError(
                f'{place} must have a "text", or a "content" of one part of the type text; images are not supported',
                name,
            )
    if not isinstance(text, str):
        raise InvalidRequestError(f"{place} must be a text, got {shown(given)}", name)
    if not is_valid_unicode(text):
        raise InvalidRequestError(f"{place} is not valid Unicode: it has a lone surrogate", name)
    return text


def pairs_of(firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str]) -> list[tuple[str, str]]:
    """Each text with its partner: one with every other, or as many with as many.

    Args:
        firsts: One text, or as many as ``seconds``.
        seconds: At least one.
        names: What messages call the two.

    Raises:
        InvalidRequestError: There are none, or their numbers do not match.
    """
    for name, texts in zip(names, (firsts, seconds), strict=True):
        if not texts:
            raise InvalidRequestError(f"{name} is empty: at least one text is needed", name)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequestError(
            f"{names[0]} has {len(firsts)} texts and {names[1]} has {len(seconds)}: give one, or as many as there are "
            f"in {names[1]}",
            names[0],
        )
    every = [firsts[0]] * len(seconds) if len(firsts) == 1 else firsts
    return list(zip(every, seconds, strict=True))


def check_pair_chars(pairs: Pairs, name: str) -> None:
    """Refuse pairs that would take too much memory, before any is made.

    Args:
        pairs: Of one request.
        name: Of the field that errors are about.

    Raises:
        InvalidRequestError: They are longer than ``MAX_PAIR_CHARS`` together.
    """
    num_chars = sum(len(first) + len(second) for first, second in pairs)
    if num_chars > MAX_PAIR_CHARS:
        raise InvalidRequestError(
            f"the {len(pairs)} pairs have {num_chars} characters together, the first text counted once for each; the "
            f"limit is {MAX_PAIR_CHARS}: send fewer or shorter texts",
            name,
        )


class PairPrompts:
    """Makes prompts of pairs for one classifier.

    Args:
        model: Its configuration.
        tokenizer: None: there is none, and no pair can be made.
    """

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._template: PairTemplate | None = None
        self._problem = ""
        self._ids = PromptIds(model, tokenizer)
        classifier = None if model.pooler is None else model.pooler.classifier
        self._joins = classifier is None or classifier.joins_texts
        if tokenizer is None:
            self._problem = "there is no tokenizer (skip_tokenizer_init)"
        elif not self._joins and model.tokenizer_path is not None:
            try:
                self._template = read_pair_template(model.tokenizer_path, tokenizer)
            except ModelLoadError as error:
                self._problem = str(error)

    def make(
        self,
        pairs: Pairs,
        params: PoolingParams,
        renderer: "ChatRenderer | None" = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[PromptType]:
        """The prompt of each pair.

        Args:
            pairs: Of texts.
            params: Of the requests; they say how much is kept.
            renderer: Of a template that reads the messages of the roles ``query`` and ``document``; None: there is no
                template.
            variables: Further variables of the template.

        Raises:
            InvalidRequestError: A pair cannot fit, the template fails on it, or the tokenizer cannot make pairs.
        """
        self._check(pairs, params, is_rendered=renderer is not None)
        if renderer is not None:
            return [renderer.render_blocking(_order(renderer, pair, variables)) for pair in pairs]
        if self._joins:
            return [first + second for first, second in pairs]
        assert self._tokenizer is not None
        ids = {text: self._tokenizer.encode_ids(text, False) for text in _texts(pairs)}
        return [self._joined(ids[first], ids[second], params) for first, second in pairs]

    async def make_off_loop(
        self,
        pairs: Pairs,
        params: PoolingParams,
        renderer: "ChatRenderer | None" = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[PromptType]:
        """The same on an event loop, which many pairs and long texts do not hold up.

        Raises:
            InvalidRequestError: As :meth:`make` does.
            QueueFullError: Too much text waits to be tokenised.
            OSError: No process can be started that renders the template.
        """
        self._check(pairs, params, is_rendered=renderer is not None)
        if renderer is not None:
            return await _rendered(renderer, pairs, variables)
        turn = _Turn()
        made: list[PromptType] = []
        if self._joins:
            for first, second in pairs:
                await turn.pass_on()
                made.append(first + second)
            return made
        assert self._tokenizer is not None
        ids: dict[str, _core.TokenIds] = {}
        for text in _texts(pairs):
            await turn.pass_on()
            if len(text) > _OFF_LOOP_CHARS:
                ids[text] = await self._tokenizer.encode_off_loop(text, False)
            else:
                ids[text] = self._tokenizer.encode_ids(text, False)
        for first, second in pairs:
            await turn.pass_on()
            two = ids[first], ids[second]
            if len(two[0]) + len(two[1]) > _MANY_IDS:
                made.append(await asyncio.to_thread(self._joined, *two, params))
            else:
                made.append(self._joined(*two, params))
        return made

    def _check(self, pairs: Pairs, params: PoolingParams, *, is_rendered: bool) -> None:
        if self._problem and not (is_rendered and self._tokenizer is not None):
            raise InvalidRequestError(f"{self._problem}: this engine cannot score pairs of texts", "model")
        if is_rendered:
            return  # the template may leave something out
        asked = pooling_params(filled_params(params, self._model))
        for length in {len(first) + len(second) for first, second in pairs}:
            self._ids.check_chars(length, asked)

    def _joined(self, first: _core.TokenIds, second: _core.TokenIds, params: PoolingParams) -> PromptType:
        assert self._template is not None
        keep = params.truncate_prompt_tokens
        if keep == -1:
            keep = self._model.max_model_len
        if keep is not None and params.truncation_side is not None:
            keep = None  # the whole pair loses one of its ends
        ids = self._template.join(first.tolist(), second.tolist(), keep)
        return TokensPrompt(prompt_token_ids=_core.TokenIds(ids))


def _texts(pairs: Pairs) -> list[str]:
    """Each text once."""
    return list(dict.fromkeys(text for pair in pairs for text in pair))


def _order(renderer: "ChatRenderer", pair: tuple[str, str], variables: Mapping[str, Any] | None) -> str | bytes:
    messages = [{"role": role, "content": text} for role, text in zip(("query", "document"), pair, strict=True)]
    return renderer.prepare(messages, {"add_generation_prompt": False, **(variables or {})})


async def _rendered(renderer: "ChatRenderer", pairs: Pairs, variables: Mapping[str, Any] | None) -> list[PromptType]:
    async def one(pair: tuple[str, str]) -> str:
        if len(pair[0]) + len(pair[1]) > _LONG_ORDER_CHARS:
            return await renderer.render(await asyncio.to_thread(_order, renderer, pair, variables))
        return await renderer.render(_order(renderer, pair, variables))

    made: list[PromptType] = []
    for begin in range(0, len(pairs), _RENDERED_AT_ONCE):
        made += await asyncio.gather(*(one(pair) for pair in pairs[begin : begin + _RENDERED_AT_ONCE]))
    return made


class _Turn:
    """Lets others have the event loop when a turn has taken long enough."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def pass_on(self) -> None:
        if time.monotonic() - self._began > _TURN_SECONDS:
            await asyncio.sleep(0)
            self._began = time.monotonic()


def cosines(pairs: Pairs, vectors: Mapping[str, npt.NDArray[np.float32] | None]) -> list[float]:
    """The cosine of the two vectors of each pair, computed in float64.

    Args:
        pairs: Of texts.
        vectors: That of each text, float32 ``[dimensions]``.
    """
    found = []
    first, a, length_a = None, np.empty(0), 0.0
    for one, other in pairs:
        if one is not first:
            first, a = one, _exact(vectors[one])
            length_a = float(np.sqrt(a @ a))
        b = _exact(vectors[other])
        found.append(float(a @ b) / max(length_a * float(np.sqrt(b @ b)), _SMALLEST))
    return found


def _exact(vector: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float64]:
    assert vector is not None, "a request that ended well has a vector"
    return vector.astype(np.float64)
