"""The model's own sampling defaults, from its generation_config.json."""

from typing import Any

from rustvllm.config import ModelConfig
from rustvllm.config.generation_defaults import GENERATION_DEFAULTS, generation_default
from rustvllm.exceptions import InvalidRequestError
from rustvllm.logger import init_logger
from rustvllm.sampling_params import SamplingParams

logger = init_logger(__name__)

_warned: set[tuple[str, str]] = set()


def default_sampling_params(model: ModelConfig, **overrides: Any) -> SamplingParams:
    """The model's own defaults from its generation_config, without what the engine cannot honour (said once per value).

    Args:
        model: For its ``generation_config``.
        overrides: Parameters that win over the model's.
    """
    values: dict[str, Any] = {}
    for source in GENERATION_DEFAULTS:
        value = model.generation_config.get(source)
        try:
            values |= generation_default(source, value)
        except InvalidRequestError as error:
            warning = (source, repr(value))
            if warning not in _warned:
                _warned.add(warning)
                logger.warning("ignoring %s=%r of generation_config.json: %s", source, value, error)
    return SamplingParams(**{**values, **overrides})
