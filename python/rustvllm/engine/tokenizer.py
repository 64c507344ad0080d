"""The tokenizer of a model: the Rust core's, with what ``tokenizer_config.json`` says beside it.

``transformers`` (and with it torch) is imported only for a model that has no ``tokenizer.json``.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rustvllm import _core
from rustvllm.exceptions import InvalidRequestError, ModelLoadError
from rustvllm.logger import init_logger
from rustvllm.sampling_params import is_valid_unicode

logger = init_logger(__name__)

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_FILE_BYTES = 256 << 20
"""A larger tokenizer file is refused: the largest of the field are a tenth of this."""
_DEFAULT_TEMPLATE = "default"


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        core: The Rust tokenizer, for an output processor.
        chat_template: Jinja source of the model's chat template; None when it has none.
        special_tokens_map: Special tokens by name (``bos_token`` …), as text.
        bos_token_id: Id of the beginning-of-sequence token; None without one.
        eos_token_id: Id of the end-of-sequence token; None without one.
    """

    def __init__(
        self,
        core: _core.Tokenizer,
        config: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Put a core tokenizer and a parsed ``tokenizer_config.json`` together."""
        config = config or {}
        self.core = core
        self.chat_template = chat_template
        self.special_tokens_map = _special_tokens(config)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        # transformers replaces the post-processor of tokenizer.json as soon as the configuration names one of these.
        self._own_affixes = any(isinstance(config.get(name), bool) for name in ("add_bos_token", "add_eos_token"))
        self._prefix = [self.bos_token_id] if config.get("add_bos_token") and self.bos_token_id is not None else []
        self._suffix = [self.eos_token_id] if config.get("add_eos_token") and self.eos_token_id is not None else []

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a model folder.

        Raises:
            ModelLoadError: There is none, or it cannot be read.
        """
        config = _read_object(folder / "tokenizer_config.json")
        path = folder / "tokenizer.json"
        if path.is_file():
            _check_size(path)
            try:
                core = _core.Tokenizer.from_file(str(path))
            except Exception as error:
                raise ModelLoadError(f"cannot read the tokenizer {path}: {error}") from error
        else:
            core = _convert(folder)
        return cls(core, config, _chat_template(folder, config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: Any valid Unicode.
            add_special_tokens: Put the beginning-of-sequence token and the like where the model expects them.

        Raises:
            InvalidRequestError: ``text`` holds lone surrogates.
        """
        if not is_valid_unicode(text):
            raise InvalidRequestError("the text is not valid Unicode: it holds a lone surrogate", "prompt")
        if not add_special_tokens or self._own_affixes:
            ids = self.core.encode(text, False)
            return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids
        return self.core.encode(text, True)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """``{"input_ids": …}``, as transformers' tokenizers answer."""
        return {"input_ids": self.encode(text, add_special_tokens)}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``."""
        return self.core.decode(list(token_ids), skip_special_tokens)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's entry for each id; None for ids it does not have."""
        return [self.core.id_to_token(token_id) for token_id in token_ids]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of a vocabulary entry; None when there is no such entry."""
        return self.core.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """Entries with the added tokens."""
        return self.core.vocab_size

    def __len__(self) -> int:
        return self.core.vocab_size

    @property
    def bos_token(self) -> str | None:
        """The beginning-of-sequence token."""
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The end-of-sequence token."""
        return self.special_tokens_map.get("eos_token")

    @property
    def unk_token(self) -> str | None:
        """The token for what the vocabulary does not have."""
        return self.special_tokens_map.get("unk_token")

    @property
    def pad_token(self) -> str | None:
        """The padding token."""
        return self.special_tokens_map.get("pad_token")

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.core.token_to_id(token)


def _check_size(path: Path) -> None:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ModelLoadError(f"{path} has {size} bytes; a tokenizer file may have {MAX_FILE_BYTES}")


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ``{}`` when there is no such file."""
    if not path.is_file():
        return {}
    _check_size(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"cannot read {path}: it must hold a JSON object, not {type(value).__name__}")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens that are set: each is written as a string, or as an object with its string in ``content``."""
    tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template: a file of its own wins over the one in ``tokenizer_config.json``."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        _check_size(path)
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"cannot read the chat template {path}: {error}") from error
    template = config.get("chat_template")
    if template is None:
        template = _read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict) and isinstance(entry.get("template"), str)
        }
        template = named.get(_DEFAULT_TEMPLATE)
    return template if isinstance(template, str) else None


def _convert(folder: Path) -> _core.Tokenizer:
    """A tokenizer without ``tokenizer.json``, by way of the transformers class that its files belong to."""
    files = sorted(path.name for path in folder.glob("*") if path.name in _LEGACY_FILES)
    if not files:
        raise ModelLoadError(
            f"no tokenizer in {folder}: there is neither tokenizer.json nor {', '.join(sorted(_LEGACY_FILES))}. "
            "Give another with tokenizer=…, or pass skip_tokenizer_init=True and send token ids"
        )
    class_name = _class_name(folder, files)
    logger.info("%s has no tokenizer.json: converting %s with transformers' %s", folder, ", ".join(files), class_name)
    try:
        import transformers

        tokenizer = getattr(transformers, class_name).from_pretrained(str(folder), trust_remote_code=False)
        return _core.Tokenizer.from_bytes(tokenizer.backend_tokenizer.to_str().encode())
    except Exception as error:
        raise ModelLoadError(
            f"cannot convert the tokenizer in {folder} ({', '.join(files)}) with transformers' {class_name}: {error}"
        ) from error


_LEGACY_FILES = frozenset({"vocab.json", "merges.txt", "tokenizer.model"})


def _class_name(folder: Path, files: list[str]) -> str:
    """The concrete class: the one the model names when it is a known one, else by the files."""
    named = str(_read_object(folder / "tokenizer_config.json").get("tokenizer_class", "")).removesuffix("Fast")
    if named in _TOKENIZER_CLASSES:
        return _TOKENIZER_CLASSES[named]
    if "tokenizer.model" in files:
        return "LlamaTokenizerFast"
    return "GPT2TokenizerFast"


_TOKENIZER_CLASSES = {
    "GPT2Tokenizer": "GPT2TokenizerFast",
    "LlamaTokenizer": "LlamaTokenizerFast",
    "CodeLlamaTokenizer": "CodeLlamaTokenizerFast",
    "Qwen2Tokenizer": "Qwen2TokenizerFast",
    "GemmaTokenizer": "GemmaTokenizerFast",
}
