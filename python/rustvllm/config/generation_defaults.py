"""``generation_config.json``: where a model's own sampling defaults come from, and which values may override them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rustvllm.exceptions import ConfigError, InvalidRequestError
from rustvllm.sampling_params import SamplingParams

GENERATION_DEFAULTS: Final[Mapping[str, str]] = {
    # name in generation_config.json -> sampling parameter
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def generation_default(source: str, value: Any) -> dict[str, Any]:
    """The sampling parameter that a value of the file is, by name; empty if it says nothing.

    Raises:
        InvalidRequestError: The engine cannot honour the value.
    """
    name = GENERATION_DEFAULTS[source]
    if value is None or (name == "max_tokens" and value == 0):
        return {}
    SamplingParams(**{name: value})
    return {name: value}


def check_generation_config(source: object) -> None:
    """Refuse a name that is neither a choice nor an existing folder or file."""
    if not isinstance(source, str | Path) or not str(source):
        raise ConfigError(f"generation_config must be auto, vllm, none, a folder or a file, got {source!r}")
    if source in ("auto", "vllm", "none"):
        return
    try:
        place = Path(source).expanduser()
        file = place / "generation_config.json" if place.is_dir() else place
        is_file = file.is_file()
    except (OSError, RuntimeError, ValueError):  # too long, or ``~user`` of an unknown user
        file, is_file = Path(source), False
    if not is_file:
        raise ConfigError(
            f"generation_config names {str(source)!r}, but there is no {file}; name another file, or use auto, vllm or "
            "none"
        )


def check_override(override: object) -> None:
    """Refuse values that a request could not have; keys that name no sampling parameter pass, as in the file."""
    if override is None:
        return
    if not isinstance(override, Mapping):
        raise ConfigError(f"override_generation_config must be a dict, got {override!r}")
    for source in GENERATION_DEFAULTS:
        try:
            generation_default(source, override.get(source))
        except InvalidRequestError as error:
            raise ConfigError(f"override_generation_config has {source} {override[source]!r:.80}: {error}") from error
    eos = override.get("eos_token_id")
    if eos is not None and not all(type(token_id) is int for token_id in (eos if isinstance(eos, list) else [eos])):
        raise ConfigError(f"override_generation_config has eos_token_id {eos!r:.80}: it must hold token ids")
