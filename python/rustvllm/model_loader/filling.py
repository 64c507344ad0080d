"""Brings a checkpoint's tensors and a model's together: by name, shape and type, and then by value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from rustvllm.exceptions import ModelLoadError
from rustvllm.logger import init_logger
from rustvllm.model_loader.checkpoint import FLOAT_DTYPES, MAX_NAMED, StoredTensor
from rustvllm.model_loader.progress import LoadProgress
from rustvllm.model_loader.reading import TensorReader
from rustvllm.models.interface import CausalLM

logger = init_logger(__name__)

HEAD_NAME = "lm_head.weight"


def fill_from_checkpoint(
    model: CausalLM,
    folder: Path,
    stored: dict[str, StoredTensor],
    filled: Callable[[Tensor], None],
    progress: LoadProgress,
) -> None:
    """Fill a model.

    Args:
        model: whose parameters have memory.
        folder: for messages.
        stored: what ``read_headers`` found there.
        filled: is told of every tensor of the model that has its values.
        progress: is told of every byte.

    Raises:
        ModelLoadError: the tensors are not exactly the model's; nothing was read then. Or a file cannot be read.
    """
    sources = _without_prefix(model, folder, stored)
    targets = model.checkpoint_tensors()
    if model.lm_head is not None:
        targets[HEAD_NAME] = model.lm_head.weight
    doubles: list[tuple[str, StoredTensor, Tensor]] = []
    for alias, name in model.tied_tensors().items():
        if alias not in sources:
            continue
        source = sources.pop(alias)
        if name in sources:
            doubles.append((alias, source, targets[name]))
        else:  # tied, and saved under this name only
            sources[name] = source
    _check(model, folder, sources, targets)
    for _, source, target in doubles:
        if source.shape != tuple(target.shape):
            raise ModelLoadError(f"{folder}: the weights do not fit: {_misshapen(source, target)}")

    progress.begin(sum(source.nbytes for source in [*sources.values(), *(source for _, source, _ in doubles)]))
    with TensorReader(progress) as reader:
        for name, source in sorted(sources.items(), key=lambda item: (item[1].file, item[1].offset)):
            target = targets.pop(name)
            reader.read_into(source, target)
            filled(target)
            del target  # what is packed gives its memory up
        for alias, source, target in doubles:
            if not reader.equals(source, target):
                logger.warning(
                    "%s: config.json ties %s to another tensor, but both are stored, with different values; both are "
                    "kept",
                    folder,
                    alias,
                )
                reader.read_into(source, model.untie(alias))


def _without_prefix(model: CausalLM, folder: Path, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    sources: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        renamed = model.checkpoint_name(name)
        bare = next((renamed.removeprefix(prefix) for prefix in model.prefixes if renamed.startswith(prefix)), renamed)
        if model.is_ignored(bare):
            continue
        bare = HEAD_NAME if bare == model.head_name else bare
        if bare in sources:
            raise ModelLoadError(f"{folder}: tensors {name!r} and {sources[bare].name!r} are the same one twice")
        sources[bare] = tensor
    return sources


def _check(model: CausalLM, folder: Path, sources: dict[str, StoredTensor], targets: dict[str, Tensor]) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's.

    Raises:
        ModelLoadError: tensors are missing, unexpected, of another shape or of no floating-point dtype.
    """
    problems = [
        _misshapen(tensor, targets[name])
        for name, tensor in sources.items()
        if name in targets and tensor.shape != tuple(targets[name].shape)
    ]
    problems += [
        f"{tensor.file.name}: tensor {tensor.name!r} has dtype {tensor.dtype}, supported: {', '.join(FLOAT_DTYPES)}"
        for name, tensor in sources.items()
        if name in targets and tensor.dtype not in FLOAT_DTYPES
    ]
    problems += [f"tensor {name!r} is missing" for name in targets if name not in sources]
    problems += [
        f"{tensor.file.name}: tensor {tensor.name!r} is unexpected"
        for name, tensor in sources.items()
        if name not in targets
    ]
    if not problems:
        return
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    raise ModelLoadError(
        f"{folder}: the weights do not fit a {type(model).__name__} of this config.json: "
        f"{'; '.join(problems[:MAX_NAMED])}{more}"
    )


def _misshapen(stored: StoredTensor, target: Tensor) -> str:
    return f"{stored.file.name}: tensor {stored.name!r} has shape {list(stored.shape)}, expected {list(target.shape)}"
