"""vLLM, through ``vllm.LLM`` (the wheel for CPUs)."""

from pathlib import Path
from typing import Any

from worker import Generate, adapter_settings, serve, vllm_drafts


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
    adapters = [
        LoRARequest(Path(path).name, number, path) for number, path in enumerate(settings.get("adapters", ()), 1)
    ]

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        of_each = [adapters[index % len(adapters)] for index in range(len(prompts))] if adapters else None
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False, lora_request=of_each)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load)
