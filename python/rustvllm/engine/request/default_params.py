"""The model's own sampling defaults, from its generation_config.json."""

from typing import Any

from rustvllm.config import ModelConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.logger import init_logger
from rustvllm.sampling_params import SamplingParams

logger = init_logger(__name__)

_GENERATION_DEFAULTS = {
    # name in generation_config.json -> sampling parameter
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_warned: set[tuple[str, str]] = set()


def default_sampling_params(model: ModelConfig, **overrides: Any) -> SamplingParams:
    """The model's own defaults from its generation_config, without what the engine cannot honour (said once per value).

    Args:
        model: For its ``generation_config``.
        overrides: Parameters that win over the model's.
    """
    values: dict[str, Any] = {}
    for source, name in _GENERATION_DEFAULTS.items():
        value = model.generation_config.get(source)
        if value is None or (name == "max_tokens" and value == 0):
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            warning = (source, repr(value))
            if warning not in _warned:
                _warned.add(warning)
                logger.warning("generation_config.json is not followed in %s=%r: %s", source, value, error)
        else:
            values[name] = value
    return SamplingParams(**{**values, **overrides})
