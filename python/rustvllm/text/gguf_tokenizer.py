"""Converts the tokenizer in a GGUF file to an equivalent ``tokenizer.json`` and ``tokenizer_config.json``.

Two kinds are supported. ``llama`` is SentencePiece's BPE: the file stores pieces with scores, and the merges follow
from these. ``gpt2`` is byte-level BPE: the file stores pieces and merges, and only names its pre-tokenizer, in
``tokenizer.ggml.pre``. Other kinds and unknown pre-tokenizers are refused by name, because an almost correct tokenizer
would silently give wrong token ids.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rustvllm.config.checkpoint.gguf_file import GgufFile
from rustvllm.exceptions import ModelLoadError

_PREFIX: Final = "tokenizer.ggml"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Token types that become added tokens, which a tokenizer looks for in a text before it does anything else."""
_SPACE: Final = "\u2581"
_TAKES_NO_SPACE: Final = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's special tokens that keep the white space after them. All others swallow it, which no key of the file says."""
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3: Final = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARK: Final = r"[^\r\n\p{L}\p{N}]?"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT_4O: Final = (
    f"{_MARK}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_MARK}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OWN_CUT: Final[Mapping[str, Any]] = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
}  # fmt: skip
_NO_CUT: Final[Mapping[str, Any]] = {**_OWN_CUT, "use_regex": False}


def _split(regex: str) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, _NO_CUT]}


_DIGITS: Final = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _OWN_CUT]}
_CUTS: Final[Mapping[str, Mapping[str, Any]]] = {
    # tokenizer.ggml.pre -> the pre-tokenizer of tokenizer.json
    "gpt-2": _OWN_CUT,
    "gpt-4o": _split(_GPT_4O),
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "deepseek-r1-qwen": _split(_QWEN2),
    "smollm": _DIGITS,
}
_INSTEAD: Final = "pass the original model's tokenizer with --tokenizer"
_SPECIAL: Final = ("bos", "eos", "pad", "mask", "sep", "cls")


def tokenizer_json(file: GgufFile) -> bytes:
    """Make the content of a ``tokenizer.json``.

    Raises:
        ModelLoadError: The file has no tokenizer, its kind is not supported, or its parts contradict each other.
    """
    kind = file.text(f"{_PREFIX}.model", "")
    make = {"llama": _sentencepiece, "gpt2": _byte_level}.get(kind)
    if make is None:
        what = f"a tokenizer of the kind {kind!r:.80}" if kind else "no tokenizer"
        raise ModelLoadError(f"{file.path} has {what}; supported: llama (SentencePiece) and gpt2 (BPE); {_INSTEAD}")
    tokens = file.items(f"{_PREFIX}.tokens", str)
    types = file.items(f"{_PREFIX}.token_type", int) or [1] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ModelLoadError(f"{file.path}: {len(tokens)} tokens have {len(types)} types: {_INSTEAD}")
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if vocabulary.setdefault(token, token_id) != token_id:
            raise ModelLoadError(
                f"{file.path}: the tokens {vocabulary[token]} and {token_id} are both {token!r:.80}: {_INSTEAD}"
            )
    found = (_UNKNOWN, _CONTROL, _USER_DEFINED)
    added = [_added(i, tokens[i], types[i]) for i in range(len(tokens)) if types[i] in found and tokens[i]]
    if file.architecture == "phi3" and kind == "llama":
        for token in added:
            token["rstrip"] = token["content"] not in _TAKES_NO_SPACE
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None,
        **make(file, tokens, types, vocabulary),
    }  # fmt: skip
    return json.dumps(content).encode()


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Make a ``tokenizer_config.json``: the special tokens, and which of them are added around a text."""
    tokens = file.items(f"{_PREFIX}.tokens", str)
    config: dict[str, Any] = {}
    for name in (*_SPECIAL, "unk"):
        key = {"unk": "unknown", "pad": "padding", "sep": "seperator"}.get(name, name)  # the format spells it so
        token_id = file.integer(f"{_PREFIX}.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    has_bos = file.text(f"{_PREFIX}.model", "") == "llama" or file.text(f"{_PREFIX}.pre", "") == "llama-bpe"
    config["add_bos_token"] = file.flag(f"{_PREFIX}.add_bos_token", has_bos) and "bos_token" in config
    config["add_eos_token"] = file.flag(f"{_PREFIX}.add_eos_token", False) and "eos_token" in config
    return config


def _added(token_id: int, token: str, kind: int) -> dict[str, Any]:
    return {
        "id": token_id, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": kind != _USER_DEFINED,
    }  # fmt: skip


def _sentencepiece(
    file: GgufFile, tokens: Sequence[str], types: Sequence[int], vocabulary: Mapping[str, int]
) -> dict[str, Any]:
    scores = file.items(f"{_PREFIX}.scores", float)
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{file.path}: {len(tokens)} tokens have {len(scores)} scores: {_INSTEAD}")
    replace: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if file.flag(f"{_PREFIX}.add_space_prefix", True):
        replace.insert(0, {"type": "Prepend", "prepend": _SPACE})
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = file.integer(f"{_PREFIX}.unknown_token_id")
    if unknown is None:
        unknown = types.index(_UNKNOWN) if _UNKNOWN in types else None
    return {
        "normalizer": {"type": "Sequence", "normalizers": replace},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {
            "type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "unk_token": None if unknown is None or not 0 <= unknown < len(tokens) else tokens[unknown],
            "fuse_unk": True, "byte_fallback": "<0x00>" in vocabulary, "ignore_merges": False,
            "vocab": vocabulary, "merges": _merges(tokens, types, scores, vocabulary),
        },
    }  # fmt: skip


def _merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """List the pairs of pieces that merge to a piece, best score first; SentencePiece's scores imply this order.

    If scores are equal, as those of runs of spaces are, the pair with the longer left part comes first, as in
    transformers' converter.
    """
    is_piece = [kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED) for kind in types]
    found: list[tuple[tuple[float, int, int, int], tuple[str, str]]] = []
    for token_id, token in enumerate(tokens):
        if not is_piece[token_id]:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            first, second = vocabulary.get(left), vocabulary.get(right)
            if first is not None and second is not None and is_piece[first] and is_piece[second]:
                found.append(((-scores[token_id], -len(left), -len(right), token_id), (left, right)))
    found.sort(key=lambda each: each[0])
    return [pair for _, pair in found]


def _byte_level(
    file: GgufFile, tokens: Sequence[str], types: Sequence[int], vocabulary: Mapping[str, int]
) -> dict[str, Any]:
    del tokens, types
    pre = file.text(f"{_PREFIX}.pre", "")
    if pre not in _CUTS:
        what = f"the pre-tokenizer {pre!r:.80}" if pre else "no tokenizer.ggml.pre, which names its pre-tokenizer"
        raise ModelLoadError(f"{file.path} has {what}; supported: {', '.join(_CUTS)}; {_INSTEAD}")
    merges = [merge.split(" ") for merge in file.items(f"{_PREFIX}.merges", str)]
    for merge in merges:
        if len(merge) != 2 or any(piece not in vocabulary for piece in (*merge, "".join(merge))):
            raise ModelLoadError(
                f"{file.path}: the merge {' '.join(merge)!r:.80} does not make a token out of two tokens: {_INSTEAD}"
            )
    return {
        "normalizer": {"type": "NFC"} if "qwen" in pre else None,
        "pre_tokenizer": _CUTS[pre],
        "decoder": _OWN_CUT,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe", "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip
