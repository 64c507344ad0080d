"""The tokenizer of a model: the Rust core's tokenizer with the settings of ``tokenizer_config.json``.

This imports neither transformers nor torch. If a model lacks ``tokenizer.json``, another process converts its older
files (:mod:`rustvllm.text.tokenizer_json`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rustvllm import _core
from rustvllm.config.checkpoint.gguf_file import GgufFile, is_gguf
from rustvllm.exceptions import InvalidRequestError, ModelLoadError
from rustvllm.text import gguf_tokenizer
from rustvllm.text.model_templates import NO_TEMPLATES, ModelTemplates
from rustvllm.text.tokenizer_json import load_tokenizer_json, read_object
from rustvllm.text.tokenizer_pool import TokenizerPool

TokenIds = _core.TokenIds
"""An array of token ids, which entry points use instead of long lists."""
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        core: The Rust tokenizer; the output processor needs it.
        chat_template: Jinja source of the model's chat template; None if the model has none.
        tool_template: Jinja source of the template for conversations with tools; None: they use ``chat_template``.
        special_tokens_map: The text of the special tokens, by name (``bos_token`` …).
        bos_token_id: Id of the beginning-of-sequence token; None if there is none.
        eos_token_id: Id of the end-of-sequence token; None if there is none.
    """

    def __init__(
        self,
        core: _core.Tokenizer,
        config: dict[str, Any] | None = None,
        templates: ModelTemplates = NO_TEMPLATES,
    ) -> None:
        """Combine a core tokenizer, a parsed ``tokenizer_config.json`` and chat templates."""
        config = config or {}
        self.core = core
        self._pool: TokenizerPool | None = None  # made for the first long text
        self.chat_template, self.tool_template = templates.default, templates.tool_use
        self.special_tokens_map = _special_tokens(config)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        # If the configuration sets one of these, transformers replaces the post-processor of tokenizer.json.
        self._own_affixes = any(isinstance(config.get(name), bool) for name in ("add_bos_token", "add_eos_token"))
        self._prefix = [self.bos_token_id] if config.get("add_bos_token") and self.bos_token_id is not None else []
        self._suffix = [self.eos_token_id] if config.get("add_eos_token") and self.eos_token_id is not None else []

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a model folder or a GGUF file.

        Raises:
            ModelLoadError: There is no tokenizer, or it cannot be read.
        """
        if is_gguf(folder):
            file = GgufFile(folder)
            return cls(read_core_tokenizer(folder), gguf_tokenizer.tokenizer_config(file), ModelTemplates.of_gguf(file))
        config = read_object(folder / "tokenizer_config.json")
        core = read_core_tokenizer(folder)
        return cls(core, config, ModelTemplates.of_folder(folder, config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids.

        Args:
            text: Any valid Unicode.
            add_special_tokens: Add the special tokens that the model expects around a text.

        Raises:
            InvalidRequestError: ``text`` contains lone surrogates.
        """
        is_plain = not add_special_tokens or self._own_affixes
        try:
            ids = self.core.encode(text, not is_plain)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), "prompt") from None
        return [*self._prefix, *ids, *self._suffix] if is_plain and add_special_tokens else ids

    def encode_ids(self, text: str, add_special_tokens: bool = True) -> _core.TokenIds:
        """Turn text into an array of token ids, like :meth:`encode` but without making a list."""
        if self._own_affixes:
            return _core.TokenIds(self.encode(text, add_special_tokens))
        try:
            return self.core.encode_ids(text, add_special_tokens)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), "prompt") from None

    async def encode_off_loop(self, text: str, add_special_tokens: bool = True) -> _core.TokenIds:
        """Turn a long text into token ids in a thread of the core, while the event loop continues.

        Raises:
            InvalidRequestError: ``text`` contains lone surrogates.
            QueueFullError: Too much text waits to be tokenised.
            RuntimeError: Another event loop is waiting for this tokenizer.
        """
        if self._pool is None:
            self._pool = TokenizerPool(self.core)
        if not add_special_tokens or not self._own_affixes:
            return await self._pool.encode(text, add_special_tokens)
        ids = await self._pool.encode(text, False)
        if not self._prefix and not self._suffix:
            return ids
        return _core.TokenIds([*self._prefix, *ids, *self._suffix])

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return ``{"input_ids": …}``, like the tokenizers of transformers."""
        return {"input_ids": self.encode(text, add_special_tokens)}

    def decode(self, token_ids: Sequence[int] | _core.TokenIds, skip_special_tokens: bool = True) -> str:
        """Turn token ids into text."""
        ids = token_ids if isinstance(token_ids, _core.TokenIds) else list(token_ids)
        return self.core.decode(ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, perhaps part of a character; for a special token, its own text."""
        return self.core.token_bytes(token_id)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's entry for each id; None for unknown ids."""
        return [self.core.id_to_token(token_id) for token_id in token_ids]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of a vocabulary entry; None if there is no such entry."""
        return self.core.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """Number of entries in the vocabulary, including added tokens."""
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
        """The token that stands for text which the vocabulary cannot express."""
        return self.special_tokens_map.get("unk_token")

    @property
    def pad_token(self) -> str | None:
        """The padding token."""
        return self.special_tokens_map.get("pad_token")

    @property
    def own_affixes(self) -> tuple[list[int], list[int]] | None:
        """Ids before and behind a text, if ``tokenizer_config.json`` says them; None: ``tokenizer.json`` does."""
        return (self._prefix, self._suffix) if self._own_affixes else None

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.core.token_to_id(token)


def read_chat_templates(place: Path) -> ModelTemplates:
    """Read the chat templates of a model folder or a GGUF file.

    Raises:
        ModelLoadError: A file cannot be read.
    """
    if is_gguf(place):
        return ModelTemplates.of_gguf(GgufFile(place))
    return ModelTemplates.of_folder(place, read_object(place / "tokenizer_config.json"))


def read_core_tokenizer(place: Path) -> _core.Tokenizer:
    """Read only the core tokenizer of a model folder or a GGUF file, without ``tokenizer_config.json`` and templates.

    Raises:
        ModelLoadError: There is no tokenizer, or it cannot be read.
    """
    if not is_gguf(place):
        return load_tokenizer_json(place, lambda path: _core.Tokenizer.from_file(str(path)))
    content = gguf_tokenizer.tokenizer_json(GgufFile(place))
    try:
        return _core.Tokenizer.from_bytes(content)
    except Exception as error:
        raise ModelLoadError(f"cannot read the tokenizer in {place}: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Read the special tokens: each is a string, or an object with the string in ``content``."""
    tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def max_token_chars(tokenizer: Tokenizer | None) -> int:
    """Length in characters of the vocabulary's longest entry, found by reading all entries; 0 without a tokenizer."""
    if tokenizer is None:
        return 0
    return max((len(token or "") for token in tokenizer.convert_ids_to_tokens(range(tokenizer.vocab_size))), default=0)
