"""vLLM, through ``vllm.LLM`` (the wheel for CPUs)."""

from typing import Any

from worker import Generate, adapter_settings, serve, vllm_drafts, vllm_generate


def load(settings: dict[str, Any]) -> Generate:
    """Load an engine with torch.compile, its default."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=False,
        **adapter_settings(settings),
        **vllm_drafts(settings),
    )
    return vllm_generate(llm, SamplingParams, LoRARequest, settings)


if __name__ == "__main__":
    serve(load)
