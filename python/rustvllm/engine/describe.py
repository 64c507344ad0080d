"""A few lines on a loaded engine for whoever started it: what it serves, where, and how much fits at a time."""

from rustvllm.config import EngineConfig


def describe_engine(config: EngineConfig, num_blocks: int) -> list[str]:
    """Start-up lines: model, device, KV cache and the concurrency it allows.

    Args:
        config: What the engine was built from.
        num_blocks: KV blocks, the null block included.
    """
    model, cache, scheduler = config.model, config.cache, config.scheduler
    usable = num_blocks - 1
    full_length = usable / -(-model.max_model_len // cache.block_size)
    return [
        f"Model       {model.served_model_name[0]} ({model.architecture}, context {model.max_model_len} tokens)",
        f"Device      {config.device.device}, {model.dtype}",
        f"KV cache    {usable} blocks of {cache.block_size} tokens = {usable * cache.block_size} tokens"
        + (", prefix caching" if cache.enable_prefix_caching else ""),
        f"Concurrency up to {scheduler.max_num_seqs} requests; the KV cache holds {full_length:.1f} of full length",
    ]
