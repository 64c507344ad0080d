"""Declaration of every engine argument: its name, type, default, and what the command line says of it."""

import argparse
from dataclasses import dataclass
from typing import Any

from rustvllm.config import CacheConfig, LoRAConfig, ModelConfig, PreemptionMode, SchedulerConfig
from rustvllm.config.flags import arg, parse_json_object, parse_max_model_len, parse_number
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
    seed: int = arg("seed of dummy weights and of requests without one", 0, type=parse_number, group="model")
    max_model_len: int | str | None = arg(
        "most tokens of prompt and output together; auto: what the model was made for, or less if the KV cache cannot "
        "hold as much",
        type=parse_max_model_len,
        group="model",
    )
    served_model_name: str | list[str] | None = arg(  # noqa: RUF009 -- it returns a dataclasses.field
        "names clients may use; the first is reported", nargs="+", group="model"
    )
    skip_tokenizer_init: bool = arg("serve token ids only", False, group="model")
    max_logprobs: int = arg(
        "most candidates per token whose log-probabilities a request may ask for; -1: the whole vocabulary",
        ModelConfig.max_logprobs,
        type=parse_number,
        group="model",
    )
    logprobs_mode: str = arg(
        "what logprobs are: raw_logprobs or raw_logits, as the model gave them; processed_logprobs or "
        "processed_logits, after penalties, masks, temperature and truncation",
        ModelConfig.logprobs_mode,
        group="model",
    )
    logits_processors: list[Any] | None = arg(  # noqa: RUF009 -- likewise
        "classes that change the logits of every step, as module:Class (in Python also the classes themselves)",
        nargs="+",
        group="model",
    )
    hf_overrides: dict[str, Any] | None = arg(  # noqa: RUF009 -- likewise
        "values that win over those of config.json, as JSON; objects are merged", type=parse_json_object, group="model"
    )
    hf_config_path: str | None = arg(
        "folder or hub name whose config.json counts instead of the model's own", group="model"
    )
    model_impl: str = arg(
        "rustvllm or transformers: whose modelling code runs; auto: rustvllm's where there is one",
        "auto",
        group="model",
    )
    trust_remote_code: bool = arg(
        "let Python code out of the model's folder run, with all rights of this process, where neither rustvllm nor "
        "transformers knows the architecture",
        False,
        group="model",
    )
    enforce_eager: bool = arg("never capture CUDA graphs", False, group="model")
    cudagraph_capture_sizes: list[int] | None = arg(  # noqa: RUF009 -- it returns a dataclasses.field
        "numbers of requests whose decode steps run as CUDA graphs (default: 1, 2, 4, 8, 16, 24 … up to max_num_seqs)",
        nargs="+",
        type=parse_number,
        group="model",
    )
    cudagraph_mixed_tokens: int = arg(
        "steps with pieces of prompts run as CUDA graphs up to so many tokens; 0: none does", 2048, group="model"
    )
    cudagraph_capture_mode: str = arg(
        "ahead: graphs are captured before the first request; lazy: each when it is first needed",
        "ahead",
        group="model",
    )
    generation_config: str = arg("auto: the model's sampling defaults; vllm: none; or a folder", "auto", group="model")
    override_generation_config: dict[str, Any] | None = arg(  # noqa: RUF009 -- likewise
        "sampling defaults as JSON", type=parse_json_object, group="model"
    )
    load_format: str = arg("auto or safetensors; dummy: seeded random weights", "auto", group="model")
    use_tqdm_on_load: bool = arg("show how far the weights are loaded", True, group="model")
    download_dir: str | None = arg("where to keep downloads (default: HF_HOME's cache)", group="model")
    device: str = arg("auto, cpu or cuda", "auto", group="model")
    attention_backend: str = arg(
        "triton: on CUDA; cpu: the core's kernels (float32, bfloat16); torch: everywhere; auto: the first that can",
        "auto",
        group="model",
    )
    quantization: str | None = arg(
        "int8: weights of one byte on the CPU, with a scale for each output; int8-g32, int8-g64, int8-g128: for each "
        "output and group of inputs; int4-g32, int4-g64, int4-g128: likewise, in half a byte; awq, gptq, "
        "compressed-tensors, fp8, gguf: as the checkpoint has them, which needs no flag",
        group="model",
    )
    batch_invariant: bool = arg("logits are bit-identical whatever else is in the batch", False, group="model")
    cpu_threads: int | None = arg(
        "threads that compute on a CPU, of each rank (default: OMP_NUM_THREADS, or one per physical core that the "
        "process may run on, within its quota; one for a model below 32 MiB)",
        None,
        type=parse_number,
        group="model",
    )
    kv_cache_dtype: str = arg(
        "auto: as the model computes; bfloat16: half as large as float32, on the CPU; int8_per_token_head: eight bits "
        "a number and a scale for each token and head, on the CPU; fp8 (fp8_e4m3): eight bits a number, on CUDA",
        "auto",
        group="cache",
    )
    block_size: int = arg("tokens of one KV block", 16, type=parse_number, group="cache")
    gpu_memory_utilization: float = arg("share of the GPU's memory to use", 0.9, type=float, group="cache")
    cpu_kv_cache_fraction: float = arg(
        "share of the container's memory limit for the KV cache on the CPU",
        CacheConfig.cpu_kv_cache_fraction,
        type=float,
        group="cache",
    )
    kv_cache_memory_bytes: int | None = arg("size of the KV cache", type=parse_number, group="cache")
    num_gpu_blocks_override: int | None = arg("number of KV blocks", type=parse_number, group="cache")
    enable_prefix_caching: bool = arg("reuse the KV of equal prompt beginnings", True, group="cache")
    prefix_caching_hash_algo: str = arg(
        "what names a cached block, in 128 bits under a secret key: builtin, xxhash and xxhash_cbor mean SipHash-1-3, "
        "sha256 and sha256_cbor mean SHA-256, truncated",
        CacheConfig.prefix_caching_hash_algo,
        group="cache",
    )
    swap_space: float = arg(
        "GiB of CPU memory for preempted requests; taken with --preemption-mode swap only",
        CacheConfig.swap_space,
        type=float,
        group="cache",
    )
    max_num_seqs: int | None = arg("most requests in one step", type=parse_number, group="scheduler")
    max_num_batched_tokens: int | None = arg("most tokens in one step", type=parse_number, group="scheduler")
    enable_chunked_prefill: bool = arg("read long prompts in several steps", True, group="scheduler")
    long_prefill_token_threshold: int = arg(
        "longest chunk of a prompt in a step with other requests, with chunked prefill; 0: no limit",
        0,
        type=parse_number,
        group="scheduler",
    )
    scheduling_policy: str = arg(
        "fcfs; priority: by the requests' own; fair: API keys share the engine by their weights, in tokens",
        "fcfs",
        group="scheduler",
    )
    max_num_queued_reqs: int = arg(
        "requests that may wait before others are turned away",
        SchedulerConfig.max_num_queued_reqs,
        type=parse_number,
        group="scheduler",
    )
    max_num_queued_tokens: int = arg(
        "prompt tokens that may wait before others are turned away; 0: no limit",
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
        "share of the KV blocks that a new request must leave free for those that run",
        SchedulerConfig.watermark,
        type=float,
        group="scheduler",
    )
    preemption_mode: PreemptionMode = arg(  # noqa: RUF009 -- likewise
        "recompute or swap: a request that loses its KV blocks is computed again, or waits in CPU memory",
        SchedulerConfig.preemption_mode,
        group="scheduler",
    )
    preemption_immunity_steps: int = arg(
        "steps for which a request that came back loses no blocks, while there is another",
        SchedulerConfig.preemption_immunity_steps,
        type=parse_number,
        group="scheduler",
    )
    max_look_past: int = arg(
        "waiting requests to try in a step after one that does not fit; 0: strictly in order",
        SchedulerConfig.max_look_past,
        type=parse_number,
        group="scheduler",
    )
    max_times_passed: int | None = arg(
        "how often one waiting request may be passed by later ones (default: 8; with --enable-lora 64, since a step "
        "that waits for the place of a rare adapter runs with fewer requests)",
        type=parse_number,
        group="scheduler",
    )
    speculative_config: dict[str, Any] | None = arg(  # noqa: RUF009 -- it returns a dataclasses.field
        'drafts that are checked by sampling, as JSON: {"method": "auto"}, or ngram or suffix with '
        "num_speculative_tokens and more (docs/speculative-decoding.md); none by default",
        type=parse_json_object,
        group="scheduler",
    )
    structured_outputs_fast_forward: bool = arg(
        "append tokens that a grammar leaves no choice about, without a step for each",
        SchedulerConfig.structured_outputs_fast_forward,
        action=argparse.BooleanOptionalAction,
        group="scheduler",
    )
    grammar_mask_wait_ms: float = arg(
        "milliseconds that a step waits behind the model for late masks of grammars, before it goes on without their "
        "requests; 0: it does not wait",
        SchedulerConfig.grammar_mask_wait_ms,
        type=float,
        group="scheduler",
    )
    async_scheduling: bool | None = arg(
        "plan a step while the one before it runs (default: yes where the device runs by itself, as a GPU and a "
        "simulated one do, unless ranks share the model; no on the CPU)",
        action=argparse.BooleanOptionalAction,
        group="scheduler",
    )

    tensor_parallel_size: int = arg(
        "ranks that hold one model together, each a part of every layer; -tp", 1, type=parse_number, group="parallel"
    )
    pipeline_parallel_size: int = arg(
        "stages that layers are divided into, each with ranks of its own; steps run in them at the same time; -pp",
        1,
        type=parse_number,
        group="parallel",
    )
    nnodes: int = arg(
        "machines that hold one model together, each as many ranks: the same command line on each, with --node-rank, "
        "and --headless on all but the first; -n",
        1,
        type=parse_number,
        group="parallel",
    )
    node_rank: int = arg(
        "which of these machines this is; 0 is the head, where the engine decides; -r",
        0,
        type=parse_number,
        group="parallel",
    )
    master_addr: str = arg(
        "name or address of the head, where it listens for the other machines", DEFAULT_MASTER_ADDR, group="parallel"
    )
    master_port: int = arg("its port there", DEFAULT_MASTER_PORT, type=parse_number, group="parallel")
    distributed_executor_backend: str | None = arg(
        "uni: one rank, in the engine's process; mp: the others in processes of these machines; ray: the others where "
        "Ray places them (needs rustvllm[ray]) (default: uni or mp, as many ranks need)",
        group="parallel",
    )
    distributed_timeout_seconds: float | None = arg(
        "seconds for which a rank may wait for another before the engine ends (default: 1800)",
        type=float,
        group="parallel",
    )

    enable_lora: bool = arg(
        "let requests name adapters, whose weights are added to the model's", False, group="adapters"
    )
    max_loras: int = arg(
        "different adapters among the requests of a step at most",
        LoRAConfig.max_loras,
        type=parse_number,
        group="adapters",
    )
    max_lora_rank: int = arg(
        "largest rank of an adapter", LoRAConfig.max_lora_rank, type=parse_number, group="adapters"
    )
    max_cpu_loras: int | None = arg(
        "adapters in memory at most (default: as many as are asked for)", type=parse_number, group="adapters"
    )
    lora_dtype: str = arg(
        "what adapters are kept in; auto: as the model, and in bfloat16 over weights of 8 bits or fewer",
        LoRAConfig.dtype,
        choices=LORA_DTYPES,
        group="adapters",
    )
    lora_modules: list[Any] | None = arg(  # noqa: RUF009 -- it returns a dataclasses.field
        'adapters to load at the start, as name=folder or {"name": ..., "path": ..., "base_model_name": ...}; each is '
        "a model that requests may name",
        nargs="+",
        group="adapters",
    )

    merge_lora: list[str] | None = arg(  # noqa: RUF009 -- as above
        "folders of adapters that are added to the model's weights while these are loaded, so that requests cost what "
        "they cost without; the model keeps its name",
        nargs="+",
        group="adapters",
    )

    step_trace_file: str | None = arg(
        "a line of JSON for every step, with its times in nanoseconds of the monotonic clock", group="observability"
    )
    disable_log_stats: bool = arg(
        "no histograms of requests and steps in /metrics, and no line with statistics in the log",
        False,
        group="observability",
    )

    trace: bool | None = arg(
        "log the journey of every request, layer by layer, with times (default: as RUSTVLLM_TRACE says, else no)",
        action=argparse.BooleanOptionalAction,
        group="observability",
    )
    trace_file: str | None = arg(
        "write steps and requests to a file that Perfetto and Chrome's tracing page show", group="observability"
    )
    otlp_traces_endpoint: str | None = arg(
        "send an OpenTelemetry span for every request to this collector, such as http://localhost:4318/v1/traces "
        "(needs rustvllm[otel])",
        group="observability",
    )

    executor: str | None = arg(
        "auto: load the model and run it in this process; sim: simulate its steps, without weights",
        "auto",
        group="simulation",
    )
    sim_step_time: float = arg("milliseconds of a simulated step", 0.0, type=float, group="simulation")
    sim_time_per_token: float = arg("milliseconds for each token of it", 0.0, type=float, group="simulation")
    sim_time_per_context_token: float = arg(
        "milliseconds for each token of context it attends to", 0.0, type=float, group="simulation"
    )
    sim_eos_after: int | None = arg(
        "simulated answers end after so many tokens (default: never by themselves)",
        type=parse_number,
        group="simulation",
    )
