"""Finds the configuration and model class of transformers for an architecture, or those of the model's folder if its
code is trusted. Importing transformers' modelling code takes seconds, so the functions here import it themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rustvllm.exceptions import ModelLoadError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_AUTO_CONFIG, _AUTO_MODEL = "AutoConfig", "AutoModelForCausalLM"


def find_model_code(
    hf_config: Mapping[str, Any], architecture: str, folder: Path | None, *, trust_remote_code: bool
) -> tuple[PretrainedConfig, type[PreTrainedModel]]:
    """The configuration as transformers reads it, and the model class.

    transformers' own classes come first. Code of the model's folder (``auto_map``) runs only if transformers does not
    know the architecture and the code is trusted.

    Args:
        hf_config: ``config.json``, including overrides.
        architecture: Name of the model class.
        folder: The model's folder; None if there is no folder with code.
        trust_remote_code: Whether code of the folder, or of the repository that it names, may run.

    Raises:
        ModelLoadError: Neither has the architecture, the code is not trusted or fails, or the configuration is refused.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = hf_config.get("model_type")
    own_class: Any = getattr(transformers, architecture, None)
    auto_map = hf_config.get("auto_map")
    code = auto_map if isinstance(auto_map, Mapping) and isinstance(auto_map.get(_AUTO_MODEL), str) else None
    if own_class is not None and _is_model_class(own_class):
        known = model_type if isinstance(model_type, str) and model_type in CONFIG_MAPPING else None
        config_class = own_class.config_class if known is None else CONFIG_MAPPING[known]
        model_class = own_class
    elif code is None:
        raise ModelLoadError(
            f"architecture {architecture!r} is neither in rustvllm nor in transformers {transformers.__version__}, and "
            "the model's folder has no code for it (config.json has no auto_map); a newer transformers may have it"
        )
    elif not trust_remote_code:
        raise ModelLoadError(
            f"architecture {architecture!r} is neither in rustvllm nor in transformers {transformers.__version__}; the "
            f"model's folder has Python code for it ({code[_AUTO_MODEL]}), which only runs with --trust-remote-code: "
            "read that code first, because it gets all rights of this process"
        )
    else:
        config_class, model_class = _remote_classes(code, architecture, folder)
    if config_class is None:
        raise ModelLoadError(f"transformers has no configuration class for {architecture!r}")
    values = {name: value for name, value in hf_config.items() if name not in ("dtype", "torch_dtype")}
    try:
        if hasattr(config_class, "_decode_special_floats"):  # JSON has no infinity, so transformers writes it as a word
            values = config_class._decode_special_floats(values)  # noqa: SLF001
        return config_class.from_dict(values), model_class
    except Exception as error:  # configuration classes raise their own errors
        raise ModelLoadError(
            f"transformers' {config_class.__name__} rejects this config.json: {_one_line(error)}"
        ) from error


def _is_model_class(candidate: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(candidate, type) and issubclass(candidate, PreTrainedModel)


def _remote_classes(auto_map: Mapping[str, Any], architecture: str, folder: Path | None) -> tuple[Any, Any]:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if folder is None:
        raise ModelLoadError(f"the code of {architecture!r} cannot be found, because there is no folder")
    try:
        model_class: Any = get_class_from_dynamic_module(auto_map[_AUTO_MODEL], str(folder))
        if isinstance(auto_map.get(_AUTO_CONFIG), str):
            config_class: Any = get_class_from_dynamic_module(auto_map[_AUTO_CONFIG], str(folder))
        else:
            config_class = getattr(model_class, "config_class", None)
    except Exception as error:  # the model's code may raise anything
        raise ModelLoadError(
            f"the model's own code ({auto_map[_AUTO_MODEL]} in {folder}) cannot be loaded: {_one_line(error)}"
        ) from error
    if not _is_model_class(model_class):
        raise ModelLoadError(f"{auto_map[_AUTO_MODEL]} in {folder} is not a PreTrainedModel")
    return config_class, model_class


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500]
