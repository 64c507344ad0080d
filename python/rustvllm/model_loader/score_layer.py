"""Completes the layer that classifies: makes it of rows of the head, if a checkpoint has none.

The rows are read from the files again, in float32, because the model may keep its embedding packed and has no head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from rustvllm.byte_progress import ByteProgress
from rustvllm.config.checkpoint.gguf_file import is_gguf
from rustvllm.exceptions import ModelLoadError
from rustvllm.model_loader.checkpoint import BLOCK_TYPES, FLOAT_DTYPES, StoredTensor, read_headers
from rustvllm.model_loader.gguf_tensors import read_gguf_headers
from rustvllm.model_loader.reading import TensorReader
from rustvllm.models.classifier import Classifier, Score
from rustvllm.text.tokenizer import read_core_tokenizer

if TYPE_CHECKING:
    from rustvllm.config import EngineConfig, ModelConfig
    from rustvllm.config.classifier import ClassifierConfig

_HEAD: Final = "lm_head.weight"


def fill_score(model: Classifier, config: EngineConfig) -> Score:
    """The layer of a loaded model, complete.

    Args:
        model: Filled from its checkpoint, or at random.
        config: Of its engine.

    Raises:
        ModelLoadError: A token has no id, the files have no head, or a number of a row is not finite.
    """
    assert config.model.pooler is not None
    classifier = config.model.pooler.classifier
    assert classifier is not None
    if classifier.tokens and config.load.load_format != "dummy":
        rows = _head_rows(model, config.model.path, _ids_of(classifier, config.model))
        if classifier.method == "from_2_way_softmax":
            rows = rows[1:] - rows[:1]
        if not bool(rows.isfinite().all()):
            tokens = ", ".join(map(repr, classifier.tokens))
            raise ModelLoadError(
                f"{config.model.path}: the head's rows of {tokens:.200} have a number that is not finite"
            )
        with torch.inference_mode():
            model.score.weight.copy_(rows)
    return model.score


def _ids_of(classifier: ClassifierConfig, model: ModelConfig) -> list[int]:
    if model.tokenizer_path is None:
        raise ModelLoadError(
            f"{model.model}: classifier_from_token needs the tokenizer, to find the tokens' ids: leave out "
            "skip_tokenizer_init"
        )
    tokenizer = read_core_tokenizer(model.tokenizer_path)
    ids = []
    for token in classifier.tokens:
        token_id = tokenizer.token_to_id(token)
        if token_id is None or token_id >= model.vocab_size:
            raise ModelLoadError(
                f"{model.model}: classifier_from_token has {token!r:.80}, which is not a token of the model: name "
                "entries of its vocabulary, written as tokenizer.json has them"
            )
        ids.append(token_id)
    return ids


def _head_rows(model: Classifier, path: Path, token_ids: list[int]) -> Tensor:
    """The head's rows of tokens as the files have them, float32 ``[num_tokens, width]``."""
    stored = read_gguf_headers(path) if is_gguf(path) else read_headers(path)
    head = _find_head(model, path, stored)
    num_rows, width = head.shape[0], model.score.weight.shape[1]
    if len(head.shape) != 2 or head.shape[1] != width or num_rows <= max(token_ids):
        raise ModelLoadError(
            f"{head.file}: tensor {head.name!r} has shape {list(head.shape)}, expected [{model.vocab_size}, {width}]"
        )
    row_bytes = head.row_stride or head.nbytes // num_rows
    rows = torch.empty(len(token_ids), width, dtype=torch.float32, device="cpu")
    with ByteProgress("reading", path.name, is_shown=False) as progress, TensorReader(progress) as reader:
        for index, token_id in enumerate(token_ids):
            own = replace(
                head, shape=(1, width), offset=head.offset + token_id * row_bytes, nbytes=head.nbytes // num_rows
            )
            reader.read_into(own, rows[index : index + 1])
    return rows


def _find_head(model: Classifier, path: Path, stored: Mapping[str, StoredTensor]) -> StoredTensor:
    """The head as it is stored; the embedding, if the head is tied to it and not stored as well."""
    bare = {_bare_name(model, name): tensor for name, tensor in stored.items()}
    head = bare.get(_HEAD) or bare.get(model.head_name)
    if head is None and model.has_tied_head:
        head = bare.get(model.embed_tokens_name)
    if head is None:
        raise ModelLoadError(f"{path}: classifier_from_token needs the head's rows, but there is no tensor {_HEAD}")
    if head.dtype not in (*FLOAT_DTYPES, *BLOCK_TYPES) or head.is_turned or head.interleaved_rows:
        raise ModelLoadError(
            f"{head.file}: tensor {head.name!r} is quantised ({head.dtype}), but classifier_from_token needs a head "
            f"in {', '.join(FLOAT_DTYPES)}"
        )
    return head


def _bare_name(model: Classifier, name: str) -> str:
    renamed = model.checkpoint_name(name)
    return next((renamed.removeprefix(prefix) for prefix in model.prefixes if renamed.startswith(prefix)), renamed)
