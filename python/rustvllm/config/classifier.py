"""What a model classifies into, and how: the labels, the activation, and where the layer behind the decoder comes from.

A ``…ForSequenceClassification`` checkpoint has that layer, ``score``. A reranker that was published as a text model has
none: its layer is made of the rows that the head has for some tokens, such as "no" and "yes".
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rustvllm.config.ranges import require_choice
from rustvllm.exceptions import ConfigError, ModelLoadError

ACTIVATIONS: Final = ("softmax", "sigmoid", "none")
METHODS: Final = ("from_2_way_softmax", "no_post_processing")
MAX_LABELS: Final = 1 << 17
"""Most labels: their probabilities are made on the event loop, in a millisecond or two."""
MAX_LABEL_BYTES: Final = 48 << 10
"""Most bytes of all labels' names as JSON: a front end gets them in the handshake, which has 64 KiB."""
_DEFAULT_LABELS: Final = 2
"""Labels where ``config.json`` says nothing, as in transformers."""
_PROBLEMS: Final[Mapping[str, str]] = {
    "regression": "none",
    "single_label_classification": "",
    "multi_label_classification": "sigmoid",
}
"""transformers' kinds of problems → their activations; empty: by the number of labels."""
_TORCH: Final = "torch.nn.modules."
_FUNCTIONS: Final[Mapping[str, str]] = {
    "activation.Sigmoid": "",
    "activation.Softmax": "",
    "linear.Identity": "none",
}
"""sentence-transformers' functions of torch → their activations; both of the others go by the number of labels."""


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """How the state of a prompt becomes one number for each label.

    Attributes:
        num_labels: How many there are.
        names: Of the labels, in order; empty: ``LABEL_0``, ``LABEL_1``, ….
        activation: What makes probabilities of the numbers, one of ``ACTIVATIONS``.
        tokens: Tokens whose rows in the head make the layer; empty: the checkpoint has the layer.
        method: How: ``from_2_way_softmax``: one row, that of the second token less that of the first;
            ``no_post_processing``: the rows as they are. Empty without ``tokens``.
        joins_texts: A pair of texts becomes one text; False: the tokenizer puts its own tokens between them.
    """

    num_labels: int
    names: tuple[str, ...] = ()
    activation: str = "softmax"
    tokens: tuple[str, ...] = ()
    method: str = ""
    joins_texts: bool = False

    def __post_init__(self) -> None:
        require_choice("activation", self.activation, ACTIVATIONS)

    def label(self, index: int) -> str:
        """The name of a label."""
        return self.names[index] if self.names else f"LABEL_{index}"


def read_classifier(hf_config: Mapping[str, Any], where: Path) -> ClassifierConfig:
    """What ``config.json`` and ``hf_overrides`` say.

    Args:
        hf_config: Both merged.
        where: The model's folder or file, for messages.

    Raises:
        ModelLoadError: A value is wrong, or asks for what is not built.
    """
    tokens, method = _tokens(hf_config, where), _method(hf_config, where)
    if bool(tokens) != bool(method):
        have, lack = ("classifier_from_token", "method") if tokens else ("method", "classifier_from_token")
        raise ModelLoadError(
            f"{where}: {have} needs {lack} in config.json or hf_overrides: method is one of {', '.join(METHODS)} and "
            'classifier_from_token a list of tokens, such as ["no", "yes"]'
        )
    if method == "from_2_way_softmax" and len(tokens) != 2:
        raise ModelLoadError(
            f"{where}: classifier_from_token must name two tokens for the method from_2_way_softmax, first the one "
            f'that means no, such as ["no", "yes"]; it names {len(tokens)}'
        )
    if tokens:
        num_labels, names = 1 if method == "from_2_way_softmax" else len(tokens), tuple[str, ...]()
    else:
        num_labels, names = _labels(hf_config, where)
    joins = hf_config.get("use_sep_token", not tokens)
    if not isinstance(joins, bool):
        raise ModelLoadError(f"{where}: use_sep_token must be true or false, got {joins!r:.80}")
    return ClassifierConfig(
        num_labels=num_labels,
        names=names,
        activation=_activation(hf_config, num_labels, where),
        tokens=tokens,
        method=method,
        joins_texts=not joins,
    )


def _tokens(hf_config: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    given = hf_config.get("classifier_from_token")
    if given is None:
        return ()
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not given or not all(isinstance(token, str) and token for token in given):
        raise ModelLoadError(
            f'{where}: classifier_from_token must be a list of tokens, such as ["no", "yes"], got {given!r:.80}'
        )
    if len(given) > MAX_LABELS:
        raise ModelLoadError(f"{where}: classifier_from_token has {len(given)} tokens; the limit is {MAX_LABELS}")
    return tuple(given)


def _method(hf_config: Mapping[str, Any], where: Path) -> str:
    if hf_config.get("is_original_qwen3_reranker") is True:
        return METHODS[0]
    method = hf_config.get("method")
    if method is None:
        return ""
    if method not in METHODS:
        raise ModelLoadError(f"{where}: method must be one of {', '.join(METHODS)}, got {method!r:.80}")
    return str(method)


def _labels(hf_config: Mapping[str, Any], where: Path) -> tuple[int, tuple[str, ...]]:
    """How many labels there are, and their names; none where they have transformers' own."""
    named, number = hf_config.get("id2label"), hf_config.get("num_labels")
    if named is not None and not isinstance(named, Mapping):
        raise ModelLoadError(f'{where}: id2label must be an object such as {{"0": "bad"}}, got {named!r:.80}')
    if number is None:
        number = _DEFAULT_LABELS if named is None else len(named)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_LABELS:
        raise ModelLoadError(f"{where}: num_labels must be an integer from 1 to {MAX_LABELS}, got {number!r:.80}")
    if named is None or len(named) != number:
        return number, ()
    names = [named.get(str(index), named.get(index)) for index in range(number)]
    if not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"{where}: id2label must name the labels 0 to {number - 1}, each as a text")
    if names == [f"LABEL_{index}" for index in range(number)]:
        return number, ()
    num_bytes = len(json.dumps(names))
    if num_bytes > MAX_LABEL_BYTES:
        raise ModelLoadError(
            f"{where}: the {number} names in id2label take {num_bytes} bytes; the limit is {MAX_LABEL_BYTES}. Set "
            f'hf_overrides to {{"id2label": null, "num_labels": {number}}} to serve the model without the names'
        )
    return number, tuple(names)


def _activation(hf_config: Mapping[str, Any], num_labels: int, where: Path) -> str:
    by_number = "sigmoid" if num_labels == 1 else "softmax"
    problem = hf_config.get("problem_type")
    if isinstance(problem, str) and problem in _PROBLEMS:
        return _PROBLEMS[problem] or by_number
    if problem is not None:
        raise ModelLoadError(f"{where}: problem_type must be one of {', '.join(_PROBLEMS)}, got {problem!r:.80}")
    of_package = hf_config.get("sentence_transformers")
    function = of_package.get("activation_fn") if isinstance(of_package, Mapping) else None
    key = "sentence_transformers.activation_fn"
    if function is None:
        key = "sbert_ce_default_activation_function"
        function = hf_config.get(key)
    if function is None:
        return by_number
    name = function.removeprefix(_TORCH) if isinstance(function, str) else ""
    if name not in _FUNCTIONS:
        known = ", ".join(f"{_TORCH}{known}" for known in _FUNCTIONS)
        raise ModelLoadError(f"{where}: {key} is {function!r:.80}, which is not supported yet: one of {known}")
    return _FUNCTIONS[name] or by_number


def check_pooler_of_classifier(pooler_config: Mapping[str, Any]) -> None:
    """Refuse values of ``pooler_config`` that only embeddings have.

    Args:
        pooler_config: The values, checked one by one.

    Raises:
        ConfigError: ``dimensions`` is among them.
    """
    if pooler_config.get("dimensions") is not None:
        raise ConfigError("dimensions of pooler_config is for embeddings, but this model classifies: leave it out")
