"""Writes a checkpoint with the first of ``lora_folders``' adapters merged into it, for engines without adapters.

    python benches/python/merged_checkpoint.py llama-160m merged
    lcpp/bin/python benches/python/engines/gguf_of.py merged merged          # merged-f32.gguf
    python benches/python/compare_offline.py --model llama-160m --shape llama-160m --adapters 1 \
        --engine llama_cpp=lcpp/bin/python:merged-f32.gguf

The script makes the first folder if it does not exist. If both engines choose the same tokens, both compute the same
model.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from compare_offline import ADAPTER_RANK, SHAPES
from lora_folders import write_adapters
from safetensors.numpy import load_file, save_file


def merge(model: Path, target: Path) -> None:
    """Copy a checkpoint, and add the adapter's products to its weights in float32."""
    shutil.copytree(model, target)
    weights = load_file(model / "model.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        [adapter] = write_adapters(model, Path(folder), 1, ADAPTER_RANK)
        tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weights[f"{module}.weight"] += tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Write the merged checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    if not (args.model / "config.json").exists():
        write, tokenizer = SHAPES["llama-160m"]
        write(args.model, tokenizer)
    merge(args.model, args.target)


if __name__ == "__main__":
    main()
