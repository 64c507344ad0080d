"""Which models embed or classify, and how: ``--runner``, ``--convert``, ``--pooler-config`` and a folder's files.

The files are those of sentence-transformers: ``modules.json`` and the configuration of its Pooling.

A pooling engine ends each request with one vector of its prompt: an embedding, or a number for each label. It generates
nothing, and its model has no head.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rustvllm.config.architectures import CLASSIFIER_ENDING
from rustvllm.config.classifier import ClassifierConfig, check_pooler_of_classifier, read_classifier
from rustvllm.config.ranges import require_choice, require_int
from rustvllm.exceptions import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from rustvllm.config.engine_config import EngineConfig

RUNNERS: Final = ("auto", "generate", "pooling")
CONVERTS: Final = ("auto", "none", "embed", "classify")
TASKS: Final = ("embed", "classify")
"""What a pooling engine can do, as vLLM names it."""
POOLING_TYPES: Final = ("LAST", "MEAN", "CLS")
MAX_FILE_BYTES: Final = 1 << 20
"""Most bytes of a sentence-transformers file."""
_POOLING_ENDINGS: Final = ("ForTextEncoding", "EmbeddingModel", "Model")
"""How names of classes end that vLLM takes for pooling models; ``LMHeadModel`` and ``ChatModel`` are none."""
_MODES: Final[Mapping[str, str]] = {"lasttoken": "LAST", "mean": "MEAN", "cls": "CLS"}
"""sentence-transformers' names of poolings."""
_NOT_BUILT: Final[Mapping[str, str]] = {
    "tok_pooling_type": "a request gives one vector, not one per token",
    "enable_chunked_processing": "a prompt must fit into max_model_len",
    "max_embed_len": "a prompt must fit into max_model_len",
    "logit_mean": "the activation takes the numbers as the layer gives them",
    "logit_sigma": "the activation takes the numbers as the layer gives them",
    "step_tag_id": "rustvllm has no reward models",
    "returned_token_ids": "rustvllm has no reward models",
}
"""vLLM's keys of ``pooler_config`` that must be left out, and why."""
_KEYS: Final = ("seq_pooling_type", "use_activation", "dimensions")
"""Keys of ``pooler_config`` that are fields of :class:`PoolerConfig`."""


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """How the hidden states of a prompt become one vector.

    Attributes:
        seq_pooling_type: ``LAST``: the last token's; ``CLS``: the first one's; ``MEAN``: the mean of all.
        use_activation: Whether embeddings are normalised to length 1, or numbers of labels become probabilities, unless
            a request says otherwise.
        dimensions: Numbers that are kept, unless a request says otherwise; None: all.
        classifier: What makes a number for each label of the vector; None: the vector is an embedding.
    """

    seq_pooling_type: str = "LAST"
    use_activation: bool = True
    dimensions: int | None = None
    classifier: ClassifierConfig | None = None

    @property
    def task(self) -> str:
        """What its engine does, as vLLM names it: ``embed`` or ``classify``."""
        return "embed" if self.classifier is None else "classify"

    def __post_init__(self) -> None:
        require_choice("seq_pooling_type", self.seq_pooling_type, POOLING_TYPES)
        if not isinstance(self.use_activation, bool):
            raise ConfigError(f"use_activation must be true or false, got {self.use_activation!r}")
        if self.dimensions is not None:
            require_int("dimensions", self.dimensions, 1)


def check_pooling_flags(runner: object, convert: object, pooler_config: object) -> None:
    """Check what needs no model.

    Raises:
        ConfigError: A value is wrong, or asks for what is not built.
    """
    for name, value, choices in (("runner", runner, RUNNERS), ("convert", convert, CONVERTS)):
        if value not in choices:
            raise ConfigError(
                f"{name} must be one of {', '.join(choices)}, got {value!r}: rustvllm generates text, embeds or "
                "classifies it"
            )
    if runner == "generate" and convert in ("embed", "classify"):
        raise ConfigError(f"runner=generate and convert={convert} contradict each other: set runner to pooling")
    if runner == "generate" and pooler_config is not None:
        raise ConfigError(
            "pooler_config is for embeddings and classification, but runner is generate: leave one of them out"
        )
    task, _ = _read_pooler_config(pooler_config)
    if task is not None and convert in ("embed", "classify") and task != convert:
        raise ConfigError(f"convert is {convert}, but task of pooler_config is {task}: leave one of them out")


def find_pooler(
    path: Path, hf_config: Mapping[str, Any], *, runner: str, convert: str, pooler_config: object
) -> PoolerConfig | None:
    """How a model pools; None if it generates text.

    Args:
        path: The model's folder, or its GGUF file.
        hf_config: Its ``config.json``.
        runner: One of ``RUNNERS``; auto: as the folder and the architecture say.
        convert: One of ``CONVERTS``; ``embed`` and ``classify`` make auto mean pooling.
        pooler_config: Values that win over those of the folder.

    Raises:
        ModelLoadError: A file of the folder is wrong, or the model pools in a way that is not built.
    """
    if runner == "generate":
        return None
    named = hf_config.get("architectures")
    task, given = _read_pooler_config(pooler_config)
    is_classifier = _first_name(named).endswith(CLASSIFIER_ENDING)
    classifies = convert == "classify" or (convert != "embed" and task != "embed" and is_classifier)
    if task == "classify" and not classifies:
        raise ConfigError(
            f"task of pooler_config is classify, but {path} has no class that ends in {CLASSIFIER_ENDING}: leave task "
            "out, or set convert to classify"
        )
    found = _of_folder(path) if path.is_dir() and not classifies else None
    is_asked = runner == "pooling" or convert in ("embed", "classify") or is_classifier
    if not is_asked and found is None and not _is_pooling_model(named):
        return None
    if hf_config.get("is_causal") is False or hf_config.get("use_bidirectional_attention") is True:
        raise ModelLoadError(
            f"{path}: each token of this model sees the tokens after it (is_causal is false or "
            "use_bidirectional_attention is true), and rustvllm only serves causal attention"
        )
    if not classifies:
        return PoolerConfig(**{**(found or {}), **given})
    check_pooler_of_classifier(given)
    return PoolerConfig(**given, classifier=read_classifier(hf_config, path))


def check_pooling(config: "EngineConfig", pooler: PoolerConfig) -> None:
    """Refuse what a pooling engine cannot be combined with.

    Raises:
        ConfigError: Names the arguments, and what to change.
    """
    model, name = config.model, pooler.seq_pooling_type
    if pooler.dimensions is not None:
        model.check_dimensions(pooler.dimensions, ConfigError)
    refused = {
        "speculative_config: there are no tokens to guess": config.speculation is not None,
        f"pipeline_parallel_size={config.parallel.pipeline_parallel_size}: set it to 1": (
            config.parallel.pipeline_parallel_size > 1
        ),
        f"model_impl=transformers: rustvllm has no code of its own for {model.architecture}": (
            model.model_impl == "transformers"
        ),
        "logits_processors: there are no logits": bool(model.logits_processors),
        f"preemption_mode=swap and {name} pooling: what is summed of a prompt is not swapped; set it to recompute": (
            config.scheduler.preemption_mode == "swap" and name != "LAST"
        ),
    }
    for reason, is_asked in refused.items():
        if is_asked:
            does = "makes embeddings" if pooler.classifier is None else "classifies"
            raise ConfigError(f"{model.model} {does} (runner=pooling), which cannot be combined with {reason}")


def _is_pooling_model(named: object) -> bool:
    first = _first_name(named)
    return first.endswith(_POOLING_ENDINGS) and not first.endswith(("LMHeadModel", "ChatModel"))


def _first_name(named: object) -> str:
    """The first of ``architectures``; empty if there is none."""
    return next((name for name in named if isinstance(name, str)), "") if isinstance(named, Sequence) else ""


def _read_pooler_config(given: object) -> tuple[str | None, dict[str, Any]]:
    """``task`` and the other keys of ``pooler_config`` under the names of :class:`PoolerConfig`, checked."""
    if given is None:
        return None, {}
    if not isinstance(given, Mapping):
        raise ConfigError(f'pooler_config must be an object such as {{"pooling_type": "MEAN"}}, got {given!r:.80}')
    values: dict[str, Any] = {}
    task: str | None = None
    for name, value in given.items():
        if value is None or (name == "enable_chunked_processing" and value is False):
            continue
        if name in _NOT_BUILT:
            raise ConfigError(f"{name} of pooler_config is not supported yet: {_NOT_BUILT[name]}")
        if name == "task":
            require_choice("task of pooler_config", value, TASKS)
            task = value
            continue
        if name == "normalize":
            raise ConfigError("normalize of pooler_config is called use_activation now: set that instead")
        key = "seq_pooling_type" if name == "pooling_type" else name
        if key not in _KEYS:
            known = ", ".join(("pooling_type", *_KEYS))
            raise ConfigError(f"pooler_config has no key {str(name)[:40]!r}: the keys are {known}")
        if key == "seq_pooling_type":
            require_choice(f"{name} of pooler_config", value, POOLING_TYPES)
        if key in values:
            raise ConfigError("pooling_type and seq_pooling_type of pooler_config mean the same: leave one of them out")
        values[key] = value
    PoolerConfig(**values)
    return task, values


def _of_folder(folder: Path) -> dict[str, Any] | None:
    """What the files of sentence-transformers say; None if there are none, or if they name no pooling."""
    modules = _read_json(folder / "modules.json", list)
    if modules is None:
        return None
    kinds = [str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else "" for module in modules]
    if "Pooling" not in kinds:
        return None
    unknown = next((kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")), None)
    if unknown is not None:
        raise ModelLoadError(
            f"{folder / 'modules.json'} has a module {unknown[:40]!r}, which is not supported yet: rustvllm has "
            "Transformer, Pooling and Normalize"
        )
    place = kinds.index("Pooling")
    if "Normalize" in kinds[:place] or kinds[place + 1 :] not in ([], ["Normalize"]):
        raise ModelLoadError(
            f"{folder / 'modules.json'} has {', '.join(kinds)[:80]}, which is not supported yet: one Pooling must come "
            "after Transformer, and Normalize, if there is one, last"
        )
    where = str(modules[place].get("path", ""))
    if not where or ".." in Path(where).parts or Path(where).is_absolute():
        raise ModelLoadError(f"{folder / 'modules.json'}: the path {where[:80]!r} of Pooling is not in that folder")
    file = folder / where / "config.json"
    about = _read_json(file, dict)
    if about is None:
        raise ModelLoadError(f"{folder / 'modules.json'} names {where[:80]}, but there is no {file}")
    return {"seq_pooling_type": _pooling_type(about, file), "use_activation": "Normalize" in kinds}


def _pooling_type(about: Mapping[str, Any], file: Path) -> str:
    """The pooling that a file asks for: as ``pooling_mode_lasttoken: true``, or as ``pooling_mode: "lasttoken"``."""
    named = about.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named) if isinstance(named, list) else []
    flags = [name for name, value in about.items() if name.startswith("pooling_mode_") and value is True]
    modes += [flag.removeprefix("pooling_mode_").partition("_token")[0] for flag in flags]
    modes = list(dict.fromkeys(map(str, modes)))
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]]
    shown = " and ".join(mode[:40] for mode in modes) or "no pooling"
    raise ModelLoadError(
        f"{file} asks for {shown}, which is not supported yet: rustvllm pools by lasttoken, mean or cls, one of them"
    )


def longest_text(folder: Path, longest: int) -> int:
    """Most tokens of a text, where sentence-transformers' file says that the model takes fewer than ``longest``.

    Raises:
        ModelLoadError: The file is wrong, or asks for texts in lower case.
    """
    file = folder / "sentence_bert_config.json"
    about = _read_json(file, dict) or {}
    if about.get("do_lower_case") is True:
        raise ModelLoadError(
            f"{file}: do_lower_case is true, but rustvllm does not change texts: only false is supported"
        )
    most = about.get("max_seq_length")
    if most is None:
        return longest
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ModelLoadError(f"{file}: max_seq_length must be a positive integer, got {most!r:.80}")
    return min(most, longest)


def _read_json(file: Path, kind: type[Any]) -> Any:
    """A JSON value from a file of sentence-transformers; None if there is no such file."""
    try:
        if not file.is_file():
            return None
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ModelLoadError(f"{file} has {file.stat().st_size} bytes; the limit is {MAX_FILE_BYTES}")
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"cannot read {str(file)[:200]}: {error.strerror}") from error
    if not isinstance(value, kind):
        wanted = "list" if kind is list else "object"
        raise ModelLoadError(f"{file} must hold a JSON {wanted}, not {type(value).__name__}")
    return value
