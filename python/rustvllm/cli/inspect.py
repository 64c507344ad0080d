"""``rustvllm inspect``: what a checkpoint is and what it needs, from its headers alone.

Neither torch is loaded nor a weight read.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rustvllm import envs
from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.cli.token_time import best_token_seconds
from rustvllm.config import ModelConfig, hub
from rustvllm.config.architectures import chosen_share
from rustvllm.config.cache import INT8_SCALE_BYTES
from rustvllm.config.checkpoint.forms import kept_layers, read_forms
from rustvllm.config.checkpoint.gguf_file import is_gguf
from rustvllm.config.checkpoint.quantized_folders import read_quantization
from rustvllm.config.model_folder import read_model_config
from rustvllm.exceptions import RustVLLMError
from rustvllm.text.tokenizer import read_chat_templates
from rustvllm.worker.host_resources import memory_limit

_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}
_SMALLEST_CACHE: Final = "int8_per_token_head"
_LENGTHS: Final = (2048, 8192, 32768)


def inspect(argv: Sequence[str]) -> int:
    """Run ``rustvllm inspect``.

    Returns:
        The exit code: 0, or 1 if the checkpoint cannot be served.
    """
    parser = FlexibleArgumentParser(
        prog="rustvllm inspect", description="Show what a checkpoint is and what memory it needs, without loading it."
    )
    parser.add_argument("model", help="folder, GGUF file or hub name; folder:Q4_K_M chooses among GGUF files")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        facts = describe(args.model, args.revision)
    except RustVLLMError as error:
        refusal = {"model": args.model, "runs": False, "why": str(error)}
        print(json.dumps(refusal) if args.json else f"{args.model} cannot be served: {error}")
        return 1
    print(json.dumps(facts, indent=2) if args.json else "\n".join(_lines(facts)))
    return 0


def describe(model: str, revision: str | None = None) -> dict[str, Any]:
    """The facts of a checkpoint on the CPU of this machine.

    Raises:
        RustVLLMError: It cannot be found or served; says why.
    """
    found = hub.resolve_model(model, revision)
    config = read_model_config(found.path, model=found.name, runner="auto")
    how = None if is_gguf(found.path) else read_quantization(config.hf_config, found.path)
    forms = read_forms(found.path, how)
    bytes_of: Counter[str] = Counter()
    for form in forms:
        bytes_of[form.kind] += form.num_bytes
    num_bytes = sum(bytes_of.values())
    templates = read_chat_templates(found.path)
    rounds = envs.activations() != "float"
    share = chosen_share(config.hf_config)
    kept = {
        dtype: kept_layers(forms, size, round_activations=rounds, chosen_share=share)
        for dtype, size in _ITEM_BYTES.items()
    }
    weights = {dtype: sum(layer.num_bytes for layer in layers) for dtype, layers in kept.items()}
    lengths = sorted({*(length for length in _LENGTHS if length < config.max_model_len), config.max_model_len})
    memory = memory_limit()
    return {
        "model": found.name,
        "path": str(found.path),
        "architecture": config.architecture,
        "modelling_code": config.model_impl,
        "parameters": sum(form.num_parameters for form in forms),
        "layers": config.num_layers,
        "vocabulary": config.vocab_size,
        "context": config.max_model_len,
        "bytes": num_bytes,
        "quantization": None if how is None else str(how),
        "forms": {kind: round(size / max(num_bytes, 1), 4) for kind, size in bytes_of.most_common()},
        "chat_template": templates.default is not None,
        "tools": templates.tool_use is not None or "tools" in (templates.default or ""),
        "weights_bytes": weights,
        "kv_cache_bytes": {
            str(length): {d: _kv_bytes(config, length, d) for d in (*_ITEM_BYTES, _SMALLEST_CACHE)}
            for length in lengths
        },
        "best_token_ms": round(1e3 * best_token_seconds(kept[config.dtype], config.hidden_size, config.num_layers), 3),
        "memory_bytes": memory,
        "runs": weights[config.dtype] + _kv_bytes(config, lengths[0], config.dtype) < memory,
    }


def _kv_bytes(config: ModelConfig, length: int, dtype: str) -> int:
    """What the keys and values of one sequence take, in a dtype or as ``--kv-cache-dtype`` calls it."""
    # Behind the features of a head in 8 bits lies the float32 that they are multiplied by.
    head_bytes = (
        config.head_dim + INT8_SCALE_BYTES if dtype == _SMALLEST_CACHE else config.head_dim * _ITEM_BYTES[dtype]
    )
    return 2 * length * config.num_layers * config.num_kv_heads * head_bytes


def _lines(facts: Mapping[str, Any]) -> list[str]:
    forms = ", ".join(f"{kind} {share:.0%}" for kind, share in facts["forms"].items())
    tools = "with tools" if facts["tools"] else "without tools"
    lines = [
        f"{facts['model']}: {facts['architecture']} ({facts['modelling_code']}'s code)",
        f"  parameters  {facts['parameters']:,} in {facts['layers']} layers, vocabulary {facts['vocabulary']:,}",
        f"  stored      {_size(facts['bytes'])}: {forms}{f' ({how})' if (how := facts['quantization']) else ''}",
        f"  context     {facts['context']:,} tokens",
        f"  template    {f'yes, {tools}' if facts['chat_template'] else 'none: chats need --chat-template'}",
    ]
    for dtype, weights in facts["weights_bytes"].items():
        lines.append(
            f"  {dtype:<11} weights {_size(weights)}; KV cache of one request by tokens: {_caches(facts, dtype)}"
        )
    lines.append(f"  8-bit cache --kv-cache-dtype {_SMALLEST_CACHE} on the CPU: {_caches(facts, _SMALLEST_CACHE)}")
    verdict = (
        "runs" if facts["runs"] else "does not fit in its default type; see --dtype bfloat16 and --quantization int8"
    )
    lines.append(f"  this CPU    {_size(facts['memory_bytes'])} of memory: {verdict}")
    lines.append(
        f"  speed       {facts['best_token_ms']:.2f} ms for a token of one stream at best, by products timed here"
    )
    return lines


def _caches(facts: Mapping[str, Any], dtype: str) -> str:
    """Tokens and the size of their KV cache, for each length."""
    return ", ".join(f"{int(n):,}: {_size(size[dtype])}" for n, size in facts["kv_cache_bytes"].items())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.1f} MiB"
