"""rustvllm, through ``LLM.generate``."""

from typing import Any

from worker import Generate, adapter_settings, serve, vllm_drafts, vllm_generate


def load(settings: dict[str, Any]) -> Generate:
    """Load an engine without prefix cache, like all engines here."""
    from rustvllm import LLM, SamplingParams
    from rustvllm.lora.request import LoRARequest

    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        device="cpu",
        quantization=settings.get("quantization"),
        kv_cache_dtype=settings.get("kv_cache_dtype", "auto"),
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,  # prompts and answers are ids
        **adapter_settings(settings),
        **vllm_drafts(settings),
    )
    return vllm_generate(llm, SamplingParams, LoRARequest, settings)


if __name__ == "__main__":
    serve(load)
