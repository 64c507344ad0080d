"""What a model that sees images cannot be combined with yet, and what its images ask of the scheduler."""

from dataclasses import replace
from typing import TYPE_CHECKING

from rustvllm.config.vision import FRAMED, VisionConfig
from rustvllm.exceptions import ConfigError
from rustvllm.logger import init_logger

if TYPE_CHECKING:
    from rustvllm.config.engine_config import EngineConfig
    from rustvllm.config.model import ModelConfig

logger = init_logger(__name__)


def check_vision(config: "EngineConfig", vision: VisionConfig) -> "ModelConfig":
    """Refuse what a model that sees images cannot be combined with yet.

    Args:
        config: With the model.
        vision: How that sees images.

    Returns:
        The model; without images if it is one that is served for text alone then.

    Raises:
        ConfigError: Names the argument, and what to change.
    """
    parallel, model, scheduler = config.parallel, config.model, config.scheduler
    refused = {
        "device=cuda: set device to cpu": config.device.device != "cpu",
        f"tensor_parallel_size={parallel.tensor_parallel_size}: set it to 1": parallel.tensor_parallel_size > 1,
        f"pipeline_parallel_size={parallel.pipeline_parallel_size}: set it to 1": parallel.pipeline_parallel_size > 1,
        "a draft model (speculative_config): use method ngram or suffix": config.draft_model is not None,
        "enable_lora: leave it out": config.lora is not None,
        "merge_lora: leave it out": bool(config.load.merge_lora),
        "runner=pooling: set runner to generate": config.model.pooler is not None,
    }
    for reason, is_asked in refused.items():
        if not is_asked:
            continue
        if vision.kind == FRAMED:
            logger.warning("%s is served for text alone: images cannot be combined with %s", model.model, reason)
            return replace(model, vision=None)
        raise ConfigError(f"{model.model} sees images, which cannot be combined with {reason}")
    if vision.attends_both_ways:
        budgets = {"max_num_batched_tokens": scheduler.max_num_batched_tokens}
        if scheduler.enable_chunked_prefill and scheduler.long_prefill_token_threshold:
            budgets["long_prefill_token_threshold"] = scheduler.long_prefill_token_threshold
        for name, budget in budgets.items():
            if budget < vision.tokens_per_tile:
                raise ConfigError(
                    f"{model.model} computes the {vision.tokens_per_tile} tokens of an image in one step, but {name} "
                    f"is {budget}: raise it to {vision.tokens_per_tile} or more, or serve text alone with "
                    'limit_mm_per_prompt={"image": 0}'
                )
    return model
