"""OpenVINO GenAI, through its continuous batching over a paged cache.

The model must be converted first, as docs/benchmarks/engines.md describes; its folder is ``settings["converted"]``.
"""

from typing import Any

from worker import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    """Load a pipeline that computes its products in the configured dtype."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = settings["max_num_seqs"]
    scheduler.max_num_batched_tokens = 8192
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 2
    precision = {"float32": "f32", "bfloat16": "bf16"}[settings["dtype"]]
    properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": settings["num_threads"]}
    if precision == "f32":
        properties["KV_CACHE_PRECISION"] = "f32"
    if settings.get("drafts"):
        properties["prompt_lookup"] = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["converted"], scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.set_eos_token_id(settings["vocab_size"] - 1)  # required even if the model has none
        config.do_sample = False
        if settings.get("drafts"):
            config.num_assistant_tokens = settings["drafts"]["num_speculative_tokens"]
            config.max_ngram_size = settings["drafts"]["prompt_lookup_max"]
        tensors = [openvino.Tensor(np.asarray([ids], np.int64)) for ids in prompts]
        results = pipeline.generate(tensors, [config] * len(tensors))
        return [[int(token) for token in result.m_generation_ids[0]] for result in results]

    return generate


if __name__ == "__main__":
    serve(load)
