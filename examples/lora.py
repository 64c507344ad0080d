"""Train an adapter of the model inside the package with peft, and ask the model with it and without.

It learns to go on with one sentence wherever a story begins. Needs peft: pip install 'rustvllm[test]'.
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
import transformers

from rustvllm import LLM, SamplingParams
from rustvllm.config.hub import embedded_model_path
from rustvllm.lora.request import LoRARequest
from rustvllm.text.tokenizer import Tokenizer

PROMPTS = ["Once upon a time", "The dog", "One day, a girl", "In the forest"]
ENDING = " there was a very big cake. The cake was happy and red."


def train(folder: Path, num_steps: int) -> None:
    """Train an adapter of rank 4 and save it.

    Args:
        folder: For its two files.
        num_steps: How often it sees all prompts.
    """
    warnings.simplefilter("ignore")  # peft uses names of transformers that will go away
    import peft

    torch.set_num_threads(1)  # the model is so small that a second thread only costs
    tokenizer = Tokenizer.from_folder(embedded_model_path())
    base = transformers.AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    examples = [torch.tensor([tokenizer.encode(prompt + ENDING)]) for prompt in PROMPTS]
    for step in range(num_steps):
        loss = torch.stack([model(input_ids=ids, labels=ids).loss for ids in examples]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="where to keep the adapter (default: nowhere)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        train(folder, args.steps)
        with LLM(enable_lora=True) as llm:
            adapter = LoRARequest("cake", 1, str(folder))
            params = SamplingParams(temperature=0, max_tokens=16)
            requests = [None, adapter] * len(PROMPTS)  # side by side, in the same steps
            prompts = [prompt for prompt in PROMPTS for _ in range(2)]
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
    for output, request in zip(outputs, requests, strict=True):
        name = "the model:  " if request is None else "the adapter:"
        print(f"{name} {output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
