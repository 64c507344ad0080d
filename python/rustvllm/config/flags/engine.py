"""Declaration of every engine argument: its name, type, default, and what the command line says of it."""

import argparse
from dataclasses import dataclass
from typing import Any

from rustvllm.config import CacheConfig, LoRAConfig, ModelConfig, PreemptionMode, SchedulerConfig
from rustvllm.config.flags.fields import arg, parse_json_object, parse_max_model_len, parse_number
from rustvllm.config.lora import LORA_DTYPES
from rustvllm.config.parallel import DEFAULT_MASTER_ADDR, DEFAULT_MASTER_PORT


@dataclass(kw_only=True)
class EngineFlags:
    """The fields of :class:`~rustvllm.config.engine_args.EngineArgs`, in the order in which ``--help`` shows them."""

    model: str | None = arg(
        "folder, GGUF file or hub name of the model; folder:Q4_K_M and owner/name:Q4_K_M choose among GGUF files "
        "(default: the model inside the package)",
        group="model",
    )
    tokenizer: str | None = arg("folder, GGUF file or hub name of the tokenizer (default: the model's)", group="model")
    revision: str | None = arg("branch, tag or commit of the model on the hub", group="model")
    dtype: str = arg("auto, float32, float16 (half) or bfloat16", "auto", group="model")
    seed: int = arg("seed of dummy weights, and of requests that set none", 0, type=parse_number, group="model")
    max_model_len: int | str | None = arg(
        "most tokens of prompt and output together; auto: the model's own limit, or less if the KV cache cannot hold "
        "that many",
        type=parse_max_model_len,
        group="model",
    )
    served_model_name: str | list[str] | None = arg(  # noqa: RUF009 -- it returns a dataclasses.field
        "model names that clients may use; logs, metrics and requests without a name use the first",
        nargs="+",
        group="model",
    )
    skip_tokenizer_init: bool = arg("load no tokenizer; prompts and outputs are token ids", False, group="model")
    max_logprobs: int = arg(
        "most log-probabilities per token that a request may ask for; -1: the whole vocabulary",
        ModelConfig.max_logprobs,
        type=parse_number,
        group="model",
    )
    logprobs_mode: str = arg(
        "values that logprobs return: raw_logprobs or raw_logits, straight from the model; processed_logprobs or "
        "processed_logits, after penalties, masks, temperature and truncation",
        ModelConfig.logprobs_mode,
        group="model",
    )
    logits_processors: list[Any] | None = arg(  # noqa: RUF009 -- likewise
        "classes that change the logits of every step, as module:Class (in Python, also the classes themselves)",
        nargs="+",
        group="model",
    )
    hf_overrides: dict[str, Any] | None = arg(  # noqa: RUF009 -- likewise
        "JSON whose values override those of config.json; objects are merged", type=parse_json_object, group="model"
    )
    hf_config_path: str | None = arg("folder or hub name whose config.json replaces the model's own", group="model")
    model_impl: str = arg(
        "modelling code to run: rustvllm or transformers; auto: rustvllm if it has the architecture",
        "auto",
        group="model",
    )
    runner: str = arg(
        "generate: text; pooling: embeddings or classification; auto: pooling for the folder of a "
        "sentence-transformers model and for classes such as Qwen3Model and Qwen3ForSequenceClassification, else "
        "generate",
        "auto",
        group="model",
    )
    convert: str = arg(
        "embed: make embeddings with a model that generates text, as --runner pooling does; classify: classify with "
        "it, which needs classifier_from_token and method in --hf-overrides, or a score layer in the files; auto, "
        "none: as --runner and the model's class say",
        "auto",
        group="model",
    )
    pooler_config: dict[str, Any] | None = arg(  # noqa: RUF009 -- likewise
        'how a prompt is pooled, as JSON: {"pooling_type": "LAST", "MEAN" or "CLS", "use_activation": true: embeddings '
        'have length 1, and classes have probabilities, "dimensions": N} (default: as the folder says, else the last '
        "token, with activation)",
        type=parse_json_object,
        group="model",
    )
    limit_mm_per_prompt: dict[str, Any] | None = arg(  # noqa: RUF009 -- likewise
        'most images of a prompt, as JSON: {"image": 4} (default: 4 for a model that sees images)',
        type=parse_json_object,
        group="model",
    )
    mm_processor_kwargs: dict[str, Any] | None = arg(  # noqa: RUF009 -- likewise
        'how images of Qwen-VL are resized, as JSON: {"min_pixels": N, "max_pixels": N} (default: as the folder says)',
        type=parse_json_object,
        group="model",
    )
    trust_remote_code: bool = arg(
        "run Python code from the model's folder, with all rights of this process, if neither rustvllm nor "
        "transformers knows the architecture",
        False,
        group="model",
    )
    enforce_eager: bool = arg("never capture CUDA graphs", False, group="model")
    cudagraph_capture_sizes: list[int] | None = arg(  # noqa: RUF009 -- it returns a dataclasses.field
        "batch sizes at which decode steps run as CUDA graphs (default: 1, 2, 4, 8, 16, 24 … up to max_num_seqs)",
        nargs="+",
        type=parse_number,
        group="model",
    )
    cudagraph_mixed_tokens: int = arg(
        "most tokens of a step with prompt chunks that runs as a CUDA graph; 0: no such step does", 2048, group="model"
    )
    cudagraph_capture_mode: str = arg(
        "ahead: capture CUDA graphs before the first request; lazy: capture each when it is first needed",
        "ahead",
        group="model",
    )
    generation_config: str = arg(
        "source of the sampling defaults: auto, the model; vllm, none; or a folder", "auto", group="model"
    )
    override_generation_config: dict[str, Any] | None = arg(  # noqa: RUF009 -- likewise
        "sampling defaults as JSON", type=parse_json_object, group="model"
    )
    load_format: str = arg("auto or safetensors; dummy: seeded random weights", "auto", group="model")
    use_tqdm_on_load: bool = arg("show the progress of loading weights", True, group="model")
    download_dir: str | None = arg("folder for downloads (default: the cache in HF_HOME)", group="model")
    device: str = arg("auto, cpu or cuda", "auto", group="model")
    attention_backend: str = arg(
        "triton: on CUDA; cpu: the core's kernels (float32, bfloat16); torch: everywhere; auto: the first that can",
        "auto",
        group="model",
    )
    quantization: str | None = arg(
        "int8: 8-bit weights on the CPU, with one scale per output; int8-g32, int8-g64, int8-g128: one scale per "
        "output and group of inputs; int4-g32, int4-g64, int4-g128: likewise, with 4-bit weights; awq, gptq, "
        "compressed-tensors, fp8, mxfp4, gguf: as the checkpoint is quantized, which needs no flag",
        group="model",
    )
    batch_invariant: bool = arg("make the logits of a request bit-identical in any batch", False, group="model")
    cpu_threads: int | None = arg(
        "CPU threads of each rank (default: OMP_NUM_THREADS, or one per physical core that the process may run on, "
        "within its quota; one for a model below 32 MiB)",
        None,
        type=parse_number,
        group="model",
    )
    kv_cache_dtype: str = arg(
        "auto: the model's dtype; bfloat16: half the size of float32, on the CPU; int8_per_token_head: 8 bits per "
        "value and a scale per token and head, on the CPU; fp8 (fp8_e4m3): 8 bits per value, on CUDA",
        "auto",
        group="cache",
    )
    block_size: int = arg("tokens per KV block", 16, type=parse_number, group="cache")
    gpu_memory_utilization: float = arg("fraction of the GPU's memory to use", 0.9, type=float, group="cache")
    cpu_kv_cache_fraction: float = arg(
        "fraction of the container's memory limit to use for the KV cache on the CPU",
        CacheConfig.cpu_kv_cache_fraction,
        type=float,
        group="cache",
    )
    kv_cache_memory_bytes: int | None = arg("size of the KV cache in bytes", type=parse_number, group="cache")
    num_gpu_blocks_override: int | None = arg("number of KV blocks", type=parse_number, group="cache")
    enable_prefix_caching: bool = arg("reuse the KV blocks of prefixes that prompts share", True, group="cache")
    prefix_caching_hash_algo: str = arg(
        "hash that identifies a cached block, 128 bits under a secret key: builtin, xxhash and xxhash_cbor mean "
        "SipHash-1-3; sha256 and sha256_cbor mean truncated SHA-256",
        CacheConfig.prefix_caching_hash_algo,
        group="cache",
    )
    swap_space: float = arg(
        "GiB of CPU memory for preempted requests, used only with --preemption-mode swap",
        CacheConfig.swap_space,
        type=float,
        group="cache",
    )
    max_num_seqs: int | None = arg("most requests in one step", type=parse_number, group="scheduler")
    max_num_batched_tokens: int | None = arg("most tokens in one step", type=parse_number, group="scheduler")
    enable_chunked_prefill: bool = arg(
        "split the prefill of long prompts into chunks, over several steps", True, group="scheduler"
    )
    long_prefill_token_threshold: int = arg(
        "most tokens of a prompt chunk in a step with other requests, with chunked prefill; 0: no limit",
        0,
        type=parse_number,
        group="scheduler",
    )
    stream_interval: int = arg(
        "tokens per streamed output; the first and the last output come at once, and a request may ask for more",
        1,
        type=parse_number,
        group="scheduler",
    )
    scheduling_policy: str = arg(
        "fcfs: first come, first served; priority: by each request's priority; fair: API keys share tokens by weight",
        "fcfs",
        group="scheduler",
    )
    max_num_queued_reqs: int = arg(
        "most waiting requests before new ones are rejected",
        SchedulerConfig.max_num_queued_reqs,
        type=parse_number,
        group="scheduler",
    )
    max_num_queued_tokens: int = arg(
        "most waiting prompt tokens before new requests are rejected; 0: no limit",
        SchedulerConfig.max_num_queued_tokens,
        type=parse_number,
        group="scheduler",
    )
    queue_timeout: float = arg(
        "seconds that a request may wait for its first step before it ends with an error; 0: no limit",
        SchedulerConfig.queue_timeout,
        type=float,
        group="scheduler",
    )
    watermark: float = arg(
        "fraction of the KV blocks that a new request must leave free for running requests",
        SchedulerConfig.watermark,
        type=float,
        group="scheduler",
    )
    preemption_mode: PreemptionMode = arg(  # noqa: RUF009 -- likewise
        "recompute: compute the KV blocks of a preempted request again; swap: keep them in CPU memory",
        SchedulerConfig.preemption_mode,
        group="scheduler",
    )
    preemption_immunity_steps: int = arg(
        "steps for which a resumed request is not preempted again, if another can be",
        SchedulerConfig.preemption_immunity_steps,
        type=parse_number,
        group="scheduler",
    )
    max_look_past: int = arg(
        "waiting requests to try in a step after one that does not fit; 0: none, strictly in order",
        SchedulerConfig.max_look_past,
        type=parse_number,
        group="scheduler",
    )
    max_times_passed: int | None = arg(
        "times that later requests may pass a waiting one (default: 8; with --enable-lora 64, since a step that waits "
        "for the place of a rare adapter runs with fewer requests)",
        type=parse_number,
        group="scheduler",
    )
    speculative_config: dict[str, Any] | None = arg(  # noqa: RUF009 -- it returns a dataclasses.field
        'speculative decoding, as JSON: {"method": "auto"}, or ngram or suffix with num_speculative_tokens and more '
        "(docs/speculative-decoding.md) (default: none)",
        type=parse_json_object,
        group="scheduler",
    )
    structured_outputs_fast_forward: bool = arg(
        "append tokens that a grammar forces without running a step for each",
        SchedulerConfig.structured_outputs_fast_forward,
        action=argparse.BooleanOptionalAction,
        group="scheduler",
    )
    grammar_mask_wait_ms: float = arg(
        "milliseconds that a step waits after the model for late grammar masks, before it goes on without their "
        "requests; 0: it does not wait",
        SchedulerConfig.grammar_mask_wait_ms,
        type=float,
        group="scheduler",
    )
    async_scheduling: bool | None = arg(
        "schedule a step while the one before it runs (default: yes on a GPU or a simulated device, unless ranks share "
        "the model; no on the CPU)",
        action=argparse.BooleanOptionalAction,
        group="scheduler",
    )

    tensor_parallel_size: int = arg(
        "ranks that share one model, each with a part of every layer; -tp", 1, type=parse_number, group="parallel"
    )
    pipeline_parallel_size: int = arg(
        "stages that the layers are divided into, each with its own ranks; different steps run in them at once; -pp",
        1,
        type=parse_number,
        group="parallel",
    )
    nnodes: int = arg(
        "machines that share one model, with equally many ranks each: run the same command line on each, with its "
        "--node-rank, and --headless on all but the first; -n",
        1,
        type=parse_number,
        group="parallel",
    )
    node_rank: int = arg(
        "number of this machine among them; 0 is the head, where the engine schedules; -r",
        0,
        type=parse_number,
        group="parallel",
    )
    master_addr: str = arg(
        "name or address of the head, where it listens for the other machines", DEFAULT_MASTER_ADDR, group="parallel"
    )
    master_port: int = arg(
        "port on which the head listens for the other machines",
        DEFAULT_MASTER_PORT,
        type=parse_number,
        group="parallel",
    )
    distributed_executor_backend: str | None = arg(
        "uni: one rank, in the engine's process; mp: further ranks in processes on these machines; ray: further ranks "
        "where Ray places them, with rustvllm[ray] (default: uni for one rank, else mp)",
        group="parallel",
    )
    distributed_timeout_seconds: float | None = arg(
        "seconds for which a rank may wait for another before the engine ends (default: 1800)",
        type=float,
        group="parallel",
    )

    enable_lora: bool = arg(
        "let requests name LoRA adapters, whose weights are added to the model's", False, group="adapters"
    )
    max_loras: int = arg(
        "most different adapters in one step",
        LoRAConfig.max_loras,
        type=parse_number,
        group="adapters",
    )
    max_lora_rank: int = arg(
        "largest rank of an adapter", LoRAConfig.max_lora_rank, type=parse_number, group="adapters"
    )
    max_cpu_loras: int | None = arg(
        "most adapters in memory (default: as many as are requested)", type=parse_number, group="adapters"
    )
    lora_dtype: str = arg(
        "dtype of adapters; auto: the model's, or bfloat16 if its weights have 8 bits or fewer",
        LoRAConfig.dtype,
        choices=LORA_DTYPES,
        group="adapters",
    )
    lora_modules: list[Any] | None = arg(  # noqa: RUF009 -- it returns a dataclasses.field
        'adapters to load at startup, as name=folder or {"name": ..., "path": ..., "base_model_name": ...}; a folder '
        "or a hub name, owner/name; requests name each as a model",
        nargs="+",
        group="adapters",
    )

    merge_lora: list[str] | None = arg(  # noqa: RUF009 -- as above
        "folders or hub names of adapters to merge into the model's weights at loading, so that requests cost no more "
        "than without them; the model keeps its name",
        nargs="+",
        group="adapters",
    )

    step_trace_file: str | None = arg(
        "write a line of JSON per step to this file, with times in nanoseconds of the monotonic clock",
        group="observability",
    )
    disable_log_stats: bool = arg(
        "leave histograms of requests and steps out of /metrics, and lines of statistics out of the log",
        False,
        group="observability",
    )

    trace: bool | None = arg(
        "log the journey of every request, layer by layer, with times (default: $RUSTVLLM_TRACE, else no)",
        action=argparse.BooleanOptionalAction,
        group="observability",
    )
    trace_file: str | None = arg(
        "write steps and requests to this file, for Perfetto or Chrome's tracing page", group="observability"
    )
    otlp_traces_endpoint: str | None = arg(
        "send an OpenTelemetry span for every request to this collector, such as http://localhost:4318/v1/traces "
        "(needs rustvllm[otel])",
        group="observability",
    )

    executor: str | None = arg(
        "auto: load the model and run it; sim: simulate its steps, without weights",
        "auto",
        group="simulation",
    )
    sim_step_time: float = arg("milliseconds that a simulated step takes", 0.0, type=float, group="simulation")
    sim_time_per_token: float = arg("further milliseconds per token of the step", 0.0, type=float, group="simulation")
    sim_time_per_context_token: float = arg(
        "further milliseconds per token of context that the step attends to", 0.0, type=float, group="simulation"
    )
    sim_eos_after: int | None = arg(
        "tokens after which a simulated answer ends by itself (default: never)",
        type=parse_number,
        group="simulation",
    )
