"""Adapters for the embedded model, and what it says with them."""

import sys
from pathlib import Path

from rustvllm import LLM, SamplingParams
from rustvllm.config.hub import embedded_model_path
from rustvllm.lora.request import LoRARequest

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
_MODELS = Path(__file__).resolve().parent.parent / "models"


def make_adapters(folders: list[Path]) -> None:
    """Make an adapter in each folder, which need not be there; each changes what the model says in another way."""
    import torch
    import transformers

    sys.path.insert(0, str(_MODELS))
    from peft_adapters import make_adapter

    reference = transformers.AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).eval()
    for seed, folder in enumerate(folders, 1):
        make_adapter(reference, folder, seed=seed, size=0.5, target_modules="all-linear")


def say(llm: LLM, request: LoRARequest | None, params: dict = GREEDY) -> str:
    [output] = llm.generate([PROMPT], SamplingParams(**params), use_tqdm=False, lora_request=request)
    return output.outputs[0].text
