"""Writes adapters for a checkpoint as peft saves them: random matrices of one rank for the blocks' dense layers."""

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


def write_adapters(checkpoint: Path, folder: Path, count: int, rank: int) -> list[Path]:
    """Write several adapters with different numbers.

    Args:
        checkpoint: Folder with ``model.safetensors``, of a model whose dense layers are called ``…_proj``.
        folder: Where to put their folders.
        count: How many.
        rank: The rank of each.
    """
    shapes = {}
    with safe_open(checkpoint / "model.safetensors", framework="np") as opened:
        for name in opened.keys():  # noqa: SIM118 -- it has no keys to iterate over
            if name.endswith("_proj.weight"):
                shapes[name.removesuffix(".weight")] = opened.get_slice(name).get_shape()
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    folders = []
    for number in range(count):
        generator = np.random.default_rng(number)
        tensors = {}
        for module, (outputs, inputs) in shapes.items():
            for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                matrix = generator.standard_normal(shape, dtype=np.float32) * np.float32(0.1 * shape[1] ** -0.5)
                tensors[f"base_model.model.{module}.lora_{kind}.weight"] = matrix
        folders.append(folder / f"adapter-{number}")
        folders[-1].mkdir()
        (folders[-1] / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, folders[-1] / "adapter_model.safetensors")
    return folders
