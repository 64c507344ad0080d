""":class:`CheckedParams`: what the lists of a request's parameters became, kept while the parameters exist."""

import weakref
from dataclasses import dataclass

from rustvllm import _core
from rustvllm.engine.request.core_request import EngineParams
from rustvllm.sampling_params.structured_outputs import ThinkingGate


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a request's parameters come to with one model.

    Attributes:
        eos_token_id: Ends a sample without a stop reason; None if no token does.
        stop_token_ids: Ids that end a sample, further EOS ids included.
        hidden_stop_ids: Those of ``stop_token_ids`` that stand for EOS.
        extras: Parameters that are lists; None without.
        grammar: What the output must be; None: anything.
        stop: Stop strings, ready to be looked for; None without.
    """

    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    hidden_stop_ids: frozenset[int]
    extras: _core.SamplingExtras | None
    grammar: _core.GrammarSpec | None = None
    stop: _core.StopStrings | None = None


class CheckedParams:
    """The rules of parameters that were seen before: one instance serves all prompts of a request.

    Parameters never change, so what they came to holds as long as they exist; then it is dropped. Where they limit
    thoughts it depends on the prompt, too: on its gate.
    """

    def __init__(self) -> None:
        self._rules: dict[tuple[int, ThinkingGate | None], tuple[weakref.ref[EngineParams], TokenRules]] = {}

    def get(self, params: EngineParams, gate: ThinkingGate | None = None) -> TokenRules | None:
        """The rules stored for this very object and gate; None if there are none."""
        found = self._rules.get((id(params), gate))
        return None if found is None or found[0]() is not params else found[1]

    def put(self, params: EngineParams, rules: TokenRules, gate: ThinkingGate | None = None) -> None:
        """Keep ``rules`` until ``params`` is gone."""
        key = (id(params), gate)
        self._rules[key] = (weakref.ref(params, lambda _: self._rules.pop(key, None)), rules)

    def __len__(self) -> int:
        return len(self._rules)
