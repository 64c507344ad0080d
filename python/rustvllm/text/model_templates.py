"""``ModelTemplates``: the chat templates that a model comes with: a default, and perhaps one for tools."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rustvllm.config.checkpoint.gguf_file import GgufFile
from rustvllm.exceptions import ModelLoadError
from rustvllm.logger import init_logger
from rustvllm.text.tokenizer_json import check_size, read_object

logger = init_logger(__name__)

_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
_FILE: Final = "chat_template.jinja"
_MORE_FILES: Final = "additional_chat_templates"
"""Folder in which transformers saves templates other than the default one, one file per name."""
_GGUF_KEY: Final = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class ModelTemplates:
    """The Jinja sources of a model's chat templates.

    Attributes:
        default: Template for all conversations; None if the model has none.
        tool_use: Template for conversations with tools; None: they use the default one.
    """

    default: str | None = None
    tool_use: str | None = None

    @classmethod
    def of_folder(cls, folder: Path, config: Mapping[str, Any]) -> "ModelTemplates":
        """Read the templates of a model's folder. As in transformers, ``.jinja`` files win over the JSON files.

        Args:
            folder: The model's folder.
            config: The parsed ``tokenizer_config.json``.

        Raises:
            ModelLoadError: A file cannot be read.
        """
        files = _files(folder)
        if _DEFAULT in files:
            return cls(files[_DEFAULT], files.get(_TOOL_USE))
        found = cls._of_config(folder, config)
        return found if found.default is None else cls(found.default, files.get(_TOOL_USE) or found.tool_use)

    @classmethod
    def _of_config(cls, folder: Path, config: Mapping[str, Any]) -> "ModelTemplates":
        where, template = folder / "tokenizer_config.json", config.get("chat_template")
        if template is None:
            where = folder / "chat_template.json"
            template = read_object(where).get("chat_template")
        if isinstance(template, list):  # older form: a list of objects
            template = {
                entry["name"]: entry.get("template")
                for entry in template
                if isinstance(entry, dict) and isinstance(entry.get("name"), str)
            }
        if isinstance(template, dict):
            return cls._choose({name: text for name, text in template.items() if isinstance(text, str)}, where)
        if template is not None and not isinstance(template, str):
            logger.warning(
                "%s: ignoring chat_template, which must be a string or named strings, not %s",
                where,
                type(template).__name__,
            )
        return cls(template) if isinstance(template, str) else cls()

    @classmethod
    def of_gguf(cls, file: GgufFile) -> "ModelTemplates":
        """Read the templates in a GGUF file.

        Raises:
            ModelLoadError: A template is not a string.
        """
        default = file.text(_GGUF_KEY, "") or None
        return cls(default, file.text(f"{_GGUF_KEY}.{_TOOL_USE}", "") or None)

    @classmethod
    def _choose(cls, named: Mapping[str, str], where: Path) -> "ModelTemplates":
        if _DEFAULT not in named:
            logger.warning(
                "%s: no chat template is named %s (there are: %s); choose one with --chat-template",
                where,
                _DEFAULT,
                ", ".join(sorted(named))[:200] or "none",
            )
            return cls()
        return cls(named[_DEFAULT], named.get(_TOOL_USE))


NO_TEMPLATES: Final = ModelTemplates()


def _files(folder: Path) -> dict[str, str]:
    """Read the templates that are ``.jinja`` files, by name."""
    paths = {_DEFAULT: folder / _FILE, _TOOL_USE: folder / _MORE_FILES / f"{_TOOL_USE}.jinja"}
    named = {}
    for name, path in paths.items():
        if not path.is_file():
            continue
        check_size(path)
        try:
            named[name] = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"cannot read the chat template {path}: {error}") from error
    return named
