""":class:`ThinkingGates`: how a budget of thoughts, and a format of the output, leave room for a request's thoughts."""

from typing import Final

from rustvllm import _core
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import SamplingParams
from rustvllm.sampling_params.structured_outputs import ThinkingGate
from rustvllm.text.tokenizer import Tokenizer
from rustvllm.text.turn_formats import AUTO, NONE, TurnFormats, find_turn_formats

_LAST_IDS: Final = 16
"""As many as may hold a marker and the space behind it."""


class ThinkingGates:
    """Gates of one model's thoughts.

    Args:
        tokenizer: Of the model; None: it has none, and its thoughts have no marks.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._formats: TurnFormats | None = None
        self._is_named = False

    @property
    def formats(self) -> TurnFormats:
        """How the model marks its thoughts; found from its chat template unless it was set."""
        if self._formats is None:
            self.read_template()
        assert self._formats is not None
        return self._formats

    @formats.setter
    def formats(self, formats: TurnFormats) -> None:
        self._formats = formats

    def read_template(self, template: str | None = None, reasoning_parser: str = AUTO) -> None:
        """Find the format of thoughts.

        Args:
            template: A chat template; None: the model's own.
            reasoning_parser: Name of a format, ``auto``: found from the template, ``none``: the model has no thoughts.
        """
        own = getattr(self._tokenizer, "chat_template", None), getattr(self._tokenizer, "tool_template", None)
        text = template or "\n".join(filter(None, own))
        self._is_named = reasoning_parser not in (AUTO, NONE)
        self._formats = find_turn_formats(text, self._tokenizer, NONE, reasoning_parser)

    def of_chat(self, params: SamplingParams, prompt: str) -> SamplingParams:
        """Parameters of an answer to a rendered conversation: what its output must be leaves its thoughts free.

        This holds for a model whose every answer is in messages (gpt-oss), and where the format of thoughts was named.
        Otherwise the text of an output is the format and nothing else, which a caller may rely on.

        Args:
            params: As they were given. A budget of thoughts is seen to by :meth:`gate`.
            prompt: Text of the prompt.
        """
        wanted = params.structured_outputs
        if wanted is None or params.thinking_token_budget not in (None, -1):
            return params
        if not (self.formats.has_messages or self._is_named):
            return params
        whole = self.formats.behind_thoughts(wanted, prompt)
        return params if whole is wanted else params.clone(structured_outputs=whole)

    def check(self, params: SamplingParams) -> None:
        """Refuse a budget for a model whose thoughts have no marks of one token each.

        Raises:
            InvalidRequestError: The model marks no thoughts, or not with single tokens.
        """
        if params.thinking_token_budget is not None and self.formats.reasoning_ids is None:
            raise InvalidRequestError(
                f"thinking_token_budget ({params.thinking_token_budget}) needs a model that marks its reasoning with "
                "single tokens, as its chat template or reasoning_parser shows: leave it out, and use max_tokens",
                "thinking_token_budget",
            )

    def gate(self, params: SamplingParams, text: str | None, ids: _core.TokenIds) -> ThinkingGate | None:
        """The gate of a request's thoughts; None: an answer with a format of its own comes behind them at once.

        Args:
            params: Of the request, which has a budget; they passed :meth:`check`.
            text: Of the prompt; None when it came as token ids.
            ids: Of the prompt, as many as are kept.
        """
        markers = self.formats.reasoning_ids
        if markers is not None and (text is None or params.truncate_prompt_tokens is not None):
            text = self._markers_of(ids, *markers)
        text = text or ""
        if params.structured_outputs is not None and self.formats.has_thought(text):
            return None  # what the output must be holds from its first token on
        return self.formats.thinking_gate(text, params.thinking_token_budget)

    def _markers_of(self, ids: _core.TokenIds, open_id: int, close_id: int) -> str:
        """A text that begins and ends thoughts where these ids do: their last marker, and their end."""
        assert self._tokenizer is not None
        last = self._tokenizer.decode(ids[-_LAST_IDS:], skip_special_tokens=False)
        backwards = ids.tolist()[::-1]
        places = {marker: backwards.index(marker) for marker in (open_id, close_id) if marker in backwards}
        if not places:
            return last
        # A space, so that text without the marker does not end with it.
        marker = self._tokenizer.decode([min(places, key=places.__getitem__)], skip_special_tokens=False)
        return last if marker in last else f"{marker} …"
