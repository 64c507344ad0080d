"""``structured_outputs`` of a request, checked and made into what the core carries."""

import json

from rustvllm import _core
from rustvllm.exceptions import InvalidRequestError
from rustvllm.structured_outputs import CallGrammar, StructuredOutputsParams
from rustvllm.text.tokenizer import Tokenizer


def make_grammar_spec(params: StructuredOutputsParams, tokenizer: Tokenizer | None) -> _core.GrammarSpec:
    """What the core carries for a request; the grammar is compiled once to see whether it can be enforced.

    Args:
        params: Checked.
        tokenizer: Of the model; None with ``skip_tokenizer_init``.

    Raises:
        InvalidRequestError: There is no tokenizer, or the grammar cannot be enforced; says why.
    """
    if tokenizer is None:
        raise InvalidRequestError(
            f"there is no tokenizer (skip_tokenizer_init), so {params.param} cannot be enforced", params.param
        )
    try:
        spec = _core.GrammarSpec(
            params.kind,
            _text_of(params),
            whitespace_pattern=params.whitespace_pattern,
            disable_any_whitespace=params.disable_any_whitespace,
            disable_additional_properties=params.disable_additional_properties,
        )
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{params.kind} of {params.param} must be valid Unicode: {error}", params.param
        ) from None
    if isinstance(params, CallGrammar):
        _core.GrammarSpec(params.kind, params.text_grammar).check(params.param)
    else:
        spec.check(params.param)
    return spec


def _text_of(params: StructuredOutputsParams) -> str:
    if params.regex is not None or params.grammar is not None:
        return params.regex or params.grammar or ""
    if isinstance(params.json, str):
        return params.json
    if params.json_object:
        return ""
    try:
        # Escapes stay as short as the characters, but lone halves of one are for the core to refuse.
        return json.dumps(list(params.choice) if params.choice is not None else params.json, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{params.kind} of {params.param} must be what JSON can say: {error}", params.param
        ) from None
