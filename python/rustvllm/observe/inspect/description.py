"""A few log lines about a loaded engine: its model, its device, and how many requests fit at a time."""

from rustvllm.config import CacheConfig, EngineConfig

_CACHE_FORMS = {"bfloat16": "bfloat16", "int8_per_token_head": "eight bits (a scale for each token and head)"}
_HASH_FUNCTIONS = {"siphash13": "SipHash-1-3, 128 bits", "sha256": "SHA-256, the first 128 bits"}


def describe_engine(config: EngineConfig, num_blocks: int) -> list[str]:
    """Start-up lines: model, device, KV cache and the concurrency that it allows.

    Args:
        config: The engine's configuration.
        num_blocks: KV blocks, including the null block.
    """
    model, cache, scheduler = config.model, config.cache, config.scheduler
    usable = num_blocks - 1
    full_length = usable / -(-model.max_model_len // cache.block_size)
    lines = [
        f"Model       {model.served_model_name[0]} ({model.architecture}, context {model.max_model_len} tokens)",
        _device_line(config),
        f"KV cache    {usable} blocks of {cache.block_size} tokens = {usable * cache.block_size} tokens"
        + (
            ""
            if cache.kv_cache_dtype == "auto"
            else f", in {_CACHE_FORMS.get(cache.kv_cache_dtype, 'eight bits (e4m3)')}"
        )
        + (f", prefix caching ({_hash_function(cache)})" if cache.enable_prefix_caching else ""),
        f"Concurrency up to {scheduler.max_num_seqs} requests; the KV cache holds {full_length:.1f} of full length",
    ]
    if (pooler := model.pooler) is not None and (classifier := pooler.classifier) is not None:
        made = f", {classifier.activation}" if pooler.use_activation and classifier.activation != "none" else ""
        labels = f"{classifier.num_labels} label{'' if classifier.num_labels == 1 else 's'}"
        lines.append(f"Classifier  {labels}{made}, {pooler.seq_pooling_type} pooling")
    elif pooler is not None:
        size = pooler.dimensions or model.embedding_size
        length = ", of length 1" if pooler.use_activation else ""
        lines.append(f"Embeddings  {size} numbers each{length}, {pooler.seq_pooling_type} pooling")
    if scheduler.preemption_mode == "swap":
        lines.append(f"Preemption  by swap, {cache.swap_space:g} GiB of CPU memory")
    if (speculation := config.speculation) is not None:
        lines.append(
            f"Drafts      by {speculation.method}, at most {speculation.num_speculative_tokens} per request and step"
            + (", as many as pay" if speculation.adaptive else ", as many as are found")
        )
    if config.lora is not None:
        lines.append(
            f"Adapters    {len(config.lora.modules)} loaded; at most {config.lora.max_loras} in a step, of rank "
            f"{config.lora.max_lora_rank} at most"
        )
    if config.load.merge_lora:
        lines.append(f"Merged      {', '.join(config.load.merge_lora)}")
    return lines


def _hash_function(cache: CacheConfig) -> str:
    """The hash function that names cached blocks, and vLLM's name that selected it."""
    name = cache.prefix_caching_hash_algo
    asked = "" if name == "builtin" else f" for {name}"
    return f"hash{asked}: {_HASH_FUNCTIONS[cache.hash_algorithm]}, keyed"


def _device_line(config: EngineConfig) -> str:
    sim = config.sim
    if sim is None:
        return f"Device      {config.device.device}, {config.model.dtype}"
    return (
        f"Device      simulated: a step takes {sim.step_time:g} ms + {sim.time_per_token:g} ms per token + "
        f"{sim.time_per_context_token:g} ms per token of context"
    )
