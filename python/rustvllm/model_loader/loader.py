"""Builds a model and fills it, from safetensors or with seeded random numbers.

Everything a checkpoint can be wrong about is found in the files' headers before the first weight is read, and what a
model takes is known before its memory is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from rustvllm.byte_progress import ByteProgress
from rustvllm.config.byte_sizes import readable_size
from rustvllm.config.checkpoint.gguf_file import WHOLE_TYPES, is_gguf
from rustvllm.config.checkpoint.quantized_folders import read_quantization, refuse_undescribed
from rustvllm.distributed.rank_group import ALONE, RankGroup
from rustvllm.distributed.stages import WHOLE, Stage
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.cpu.narrow import NARROW_DTYPES
from rustvllm.layers.linear import without_weights
from rustvllm.layers.parallel import shared_by
from rustvllm.layers.whole_rows import WholeForm, storage_of
from rustvllm.logger import init_logger
from rustvllm.model_loader.checkpoint import BLOCK_TYPES, StoredTensor, read_headers
from rustvllm.model_loader.dummy_weights import fill_dummy_weights
from rustvllm.model_loader.expert_stacks import STACKED_ARCHITECTURES, split_stacks
from rustvllm.model_loader.filling import LayerPacker, Match, fill_from_checkpoint, match_tensors, stored_of_stage
from rustvllm.model_loader.gguf_tensors import read_gguf_headers
from rustvllm.model_loader.quantized_tensors import QuantizedTensor, join_quantized
from rustvllm.models.interface import CausalLM
from rustvllm.models.registry import make_model

if TYPE_CHECKING:
    from rustvllm.config import LoadConfig, ModelConfig

logger = init_logger(__name__)

_UNNAMED: Final = "config.json"
"""How messages of layers begin, which know a model's configuration, but not its file."""


def load_model(
    model_config: ModelConfig,
    load_config: LoadConfig,
    dtype: torch.dtype,
    device: torch.device,
    available_memory: int,
    make_packer: Callable[[CausalLM], LayerPacker] | None = None,
    group: RankGroup = ALONE,
    stage: Stage = WHOLE,
    changes_of: Callable[[CausalLM], Mapping[str, Callable[[Tensor], None]]] | None = None,
) -> CausalLM:
    """Build the model of a configuration on a device and fill it.

    Args:
        model_config: Which architecture, from where, for how long sequences.
        load_config: From safetensors (``auto``, ``safetensors``) or at random (``dummy``).
        dtype: Of every parameter, whatever the checkpoint stores.
        device: Where the parameters lie.
        available_memory: bytes that are free there.
        make_packer: Given the model without memory, what packs its dense layers as they are filled; None packs nothing.
        group: The ranks that share its layers; this one gets, and reads, its part.
        stage: Which layers this rank has; it reads no others.
        changes_of: Given the model without memory, what changes its tensors, by name; see ``fill_from_checkpoint``.

    Raises:
        ModelLoadError: The configuration or a file is wrong; the message names the file, the tensor, what was expected
            and what was found.
    """
    started = time.monotonic()
    build = make_model(model_config, group, stage)
    stored = None if load_config.load_format == "dummy" else _read_headers(model_config)
    # On the meta device a model takes no memory: what it needs is known before it is taken.
    with _defaults(dtype, torch.device("meta")), shared_by(group, stage), _named_errors(model_config):
        outline = build()
    limit = outline.max_positions
    if limit is not None and model_config.max_model_len > limit:
        # Beyond it the position table would be read out of bounds.
        raise ModelLoadError(
            f"max_model_len is {model_config.max_model_len}, but this {model_config.architecture} has {limit} "
            f"positions; set --max-model-len {limit} or less"
        )
    if stored is not None and stage.count > 1:
        with _defaults(dtype, torch.device("meta")), shared_by(group):
            stored = stored_of_stage(outline, build(), stored)
    changes = {} if changes_of is None else changes_of(outline)
    packer = None if make_packer is None else make_packer(outline)
    is_compared = False
    if packer is not None and stored is not None:
        match = match_tensors(outline, model_config.path, stored)
        packer.plan(outline, outline.tied_embedding, *_stored_forms(match))
        is_compared = bool(match.doubles)
    size = sum(parameter.nbytes for parameter in outline.parameters())
    if packer is not None:
        size = packer.resident_bytes(size)
    if size > available_memory:
        raise ModelLoadError(_too_large(model_config.model, outline, size, available_memory, dtype, device))
    leaves_out = packer is not None and packer.leaves_weights_out
    if packer is not None and not leaves_out and outline.has_parameters_alone and not is_compared:
        model = outline  # to build it again would take longer than to pack a small model
        packer.make_room(model)
    else:
        with _defaults(dtype, device), shared_by(group, stage), without_weights() if leaves_out else nullcontext():
            model = build()
        if packer is not None:
            if stored is not None:
                match = match_tensors(model, model_config.path, stored)
                packer.plan(model, model.tied_embedding, *_stored_forms(match))
            packer.make_room(model)
    if packer is not None:
        packer.watch(model, model.tied_embedding)
    filled: Callable[[Tensor], None] = (lambda _: None) if packer is None else _filled_of(packer, model, model_config)
    with torch.inference_mode():
        if stored is None:
            fill_dummy_weights(model, model_config.seed, filled)
        else:
            with ByteProgress("loading", model_config.model, is_shown=load_config.use_tqdm_on_load) as progress:
                packs = packer if packer is not None and packer.packs_rows else None
                fill_from_checkpoint(model, model_config.path, stored, filled, progress, packs, changes)
            _log_forms(model_config.path, stored, packer, dtype)
        if packer is not None:
            model.head_kernel = packer.finish(model, model.tied_embedding)
        model.check_filled()
    logger.info("loaded %s: %.1f MiB in %.1f s", model_config.model, size / 2**20, time.monotonic() - started)
    return model.eval()


def _filled_of(packer: LayerPacker, model: CausalLM, model_config: ModelConfig) -> Callable[[Tensor], None]:
    """``packer.filled``, whose errors name the parameter: of one layer there are many."""
    names = {storage_of(parameter): name for name, parameter in model.named_parameters()}

    def filled(target: Tensor) -> None:
        try:
            packer.filled(target)
        except ModelLoadError as error:
            name = names.get(storage_of(target), "a layer")
            raise ModelLoadError(f"{model_config.model}: {name} of the model: {error}") from error

    return filled


def _read_headers(model_config: ModelConfig) -> dict[str, StoredTensor]:
    path = model_config.path
    if is_gguf(path):
        return read_gguf_headers(path)
    stored, how = read_headers(path), read_quantization(model_config.hf_config, path)
    if model_config.architecture in STACKED_ARCHITECTURES and model_config.model_impl != "transformers":
        stored = split_stacks(stored, path)
    elif how is not None and how.method == "mxfp4":
        raise ModelLoadError(
            f"{how.file}: this checkpoint is {how}, which rustvllm reads for {', '.join(STACKED_ARCHITECTURES)} with "
            f"its own code, not for {model_config.architecture}. Use a GGUF file of the model, or the model's original "
            "weights with --quantization int8"
        )
    if how is None:
        refuse_undescribed({name: tensor.dtype for name, tensor in stored.items()}, path)
        return stored
    return join_quantized(stored, how, path, is_turned=model_config.architecture == "GPT2LMHeadModel")


def _stored_forms(
    match: Match,
) -> tuple[list[tuple[Tensor, WholeForm | None]], list[tuple[Tensor, torch.dtype]]]:
    """Every tensor of a model, with how its stored numbers have scales, if they are whole; and those in 16 bits."""
    forms = [(match.targets[name], _whole_form(source)) for name, source in match.sources.items()]
    narrow = [
        (match.targets[name], NARROW_DTYPES[source.dtype])
        for name, source in match.sources.items()
        if source.dtype in NARROW_DTYPES and not source.added
    ]
    return forms, narrow


def _whole_form(source: StoredTensor) -> WholeForm | None:
    if isinstance(source, QuantizedTensor):
        return WholeForm(source.form, source.input_order) if source.is_whole else None
    form = WHOLE_TYPES.get(source.dtype)
    return None if form is None else WholeForm(form)


def _log_forms(path: Path, stored: dict[str, StoredTensor], packer: LayerPacker | None, dtype: torch.dtype) -> None:
    """Say which tensors are kept otherwise than they are stored."""
    whole = 0 if packer is None else packer.num_whole_layers
    kept = "none" if packer is None else packer.described_whole_layers
    quantized = Counter(tensor.dtype for tensor in stored.values() if isinstance(tensor, QuantizedTensor))
    if quantized:
        logger.info(
            "%s: weights of %s; %d dense layers keep the checkpoint's integers and scales (%s), other quantised "
            "tensors become %s",
            path.name,
            ", ".join(f"{kind} ({count})" for kind, count in quantized.most_common()),
            whole,
            kept,
            str(dtype).removeprefix("torch."),
        )
    in_blocks = (tensor for tensor in stored.values() if not isinstance(tensor, QuantizedTensor))
    counts = Counter(tensor.dtype for tensor in in_blocks if tensor.dtype in BLOCK_TYPES)
    if not counts:
        return
    logger.info(
        "%s: blocks of %s; %d dense layers keep the file's integers and scales (%s), other tensors in blocks become %s",
        path.name,
        ", ".join(f"{kind} ({count})" for kind, count in counts.most_common()),
        whole,
        kept,
        str(dtype).removeprefix("torch."),
    )


def _too_large(
    name: str, outline: CausalLM, size: int, available: int, dtype: torch.dtype, device: torch.device
) -> str:
    """What to say of a model that does not fit: what it needs, and what would fit."""
    num_parameters = sum(parameter.numel() for parameter in outline.parameters())
    advice = []
    if dtype.itemsize > 2:
        half = 2 * num_parameters
        verdict = "which fits" if half <= available else "too much as well"
        advice.append(f"with --dtype bfloat16 {readable_size(half)}, {verdict}")
    if device.type == "cpu":
        verdict = "which may fit" if num_parameters <= available else "too much as well"
        advice.append(f"with --quantization int8 about {readable_size(num_parameters)}, {verdict}")
    largest = available / dtype.itemsize
    fitting = f"{largest / 1e9:.1f} billion" if largest >= 1e9 else f"{largest / 1e6:.1f} million"
    advice.append(f"else a model of at most {fitting} parameters, or more memory")
    return (
        f"{name} needs {readable_size(size)} in {str(dtype).removeprefix('torch.')} for its parameters, but "
        f"{readable_size(available)} are free on {device}; {'; '.join(advice)}"
    )


@contextmanager
def _named_errors(model_config: ModelConfig) -> Iterator[None]:
    """Errors of layers say ``config.json``; here they get the path of what that is: a GGUF file has no such file."""
    try:
        yield
    except ModelLoadError as error:
        message = str(error)
        if model_config.config_file is None or not message.startswith(_UNNAMED):
            raise
        raise ModelLoadError(f"{model_config.config_file}{message.removeprefix(_UNNAMED)}") from error


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
