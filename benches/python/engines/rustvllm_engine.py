"""rustvllm, by ``LLM.generate``."""

from typing import Any

from worker import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    """An engine with its prefix cache off, as in all of them."""
    from rustvllm import LLM, SamplingParams

    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        device="cpu",
        quantization=settings.get("quantization"),
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load)
