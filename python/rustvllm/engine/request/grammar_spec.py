"""``structured_outputs`` of a request, checked and made into what the core carries."""

import json
import time
from typing import Final

from rustvllm import _core
from rustvllm.exceptions import InvalidRequestError
from rustvllm.logger import init_logger
from rustvllm.process.memory import give_back_memory
from rustvllm.sampling_params.structured_outputs import (
    CallGrammar,
    GatedOutputs,
    MessageOutputs,
    StructuredOutputsParams,
    shown_places,
)
from rustvllm.text.tokenizer import Tokenizer

logger = init_logger(__name__)

_LONG_SECONDS: Final = 0.05
"""A check that takes as long takes some ten megabytes, too, which are given back at once."""


def make_grammar_spec(params: StructuredOutputsParams, tokenizer: Tokenizer | None) -> _core.GrammarSpec:
    """What the core carries for a request; the grammar is compiled once to see whether it can be enforced.

    Args:
        params: Checked.
        tokenizer: Of the model; None with ``skip_tokenizer_init``.

    Raises:
        InvalidRequestError: There is no tokenizer, or the grammar cannot be enforced; says why.
    """
    began = time.monotonic()  # the core checks large grammars in another thread
    try:
        return _checked_spec(params, tokenizer)
    finally:
        if time.monotonic() - began > _LONG_SECONDS:
            give_back_memory()


def _checked_spec(params: StructuredOutputsParams, tokenizer: Tokenizer | None) -> _core.GrammarSpec:
    if tokenizer is None:
        raise InvalidRequestError(
            f"there is no tokenizer (skip_tokenizer_init), so {params.param} cannot be enforced", params.param
        )
    if isinstance(params, MessageOutputs):
        answer = _checked_spec(params.answer, tokenizer)
        return answer.in_messages(params.answer.param, dict(params.marker_ids), params.begins_within)
    thinking = None
    if isinstance(params, GatedOutputs):
        gate = params.gate
        thinking = (gate.open_id, gate.close_id, gate.begins_within, gate.budget, list(gate.end_ids))
        if params.answer is None:
            return _core.GrammarSpec("anything", thinking=thinking)
        params = params.answer
    if params.structural_tag is not None:
        return _spec_of_tag(params, tokenizer, thinking)
    try:
        spec = _core.GrammarSpec(
            params.kind,
            _text_of(params),
            whitespace_pattern=params.whitespace_pattern,
            disable_any_whitespace=params.disable_any_whitespace,
            disable_additional_properties=params.disable_additional_properties,
            thinking=thinking,
        )
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{params.kind} of {params.param} must be valid Unicode: {error}", params.param
        ) from None
    if isinstance(params, CallGrammar):
        _core.GrammarSpec(params.kind, params.text_grammar).check(params.param)
    elif params.strict:
        spec.check(params.param)
    else:
        spec, places, count = spec.relaxed(params.param)
        params.unenforced.note(places, count)
    if params.unenforced.count:
        logger.warning("the schema of %s is not enforced at %s", params.param, shown_places(params.unenforced))
    return spec


def _spec_of_tag(
    params: StructuredOutputsParams, tokenizer: Tokenizer, thinking: tuple[int, int, bool, int | None, list[int]] | None
) -> _core.GrammarSpec:
    """Of a structural tag: its schemas one by one, for errors that name their place, and then all of it."""
    tag = params.read_structural_tag()
    try:
        for structure in tag.structures:
            text = json.dumps(structure.schema, allow_nan=False)
            _core.GrammarSpec("json", text).check(params.param)
        _core.GrammarSpec("grammar", tag.lark({})).check(params.param)
        special = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in tag.marks()}
        ids = {
            mark: token_id
            for mark, token_id in special.items()
            if token_id is not None and tokenizer.decode([token_id]) == ""
        }
        return _core.GrammarSpec("grammar", tag.lark(ids), thinking=thinking)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(
            f"structural_tag of {params.param} must only hold values that JSON can express: {error}", params.param
        ) from None


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
            f"{params.kind} of {params.param} must only hold values that JSON can express: {error}", params.param
        ) from None
