"""Experts as folders of gpt-oss have them in MXFP4, and what their codes mean, number by number in plain numpy."""

import json

import numpy as np
import torch
from tiny_checkpoint import MXFP4_BLOCK, MXFP4_CONFIG

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Of codes 0 to 7; 8 to 15 are the same with a minus."""
BIAS = 127


def random_blocks(weight):
    """Codes and exponents near a weight ``[outputs, inputs]``.

    Returns:
        uint8 ``[outputs, groups, 16]``, low nibble first; uint8 ``[outputs, groups]``; and what they mean, float32.
    """
    groups = weight.reshape(weight.shape[0], -1, MXFP4_BLOCK).astype(np.float64)
    exponents = np.ceil(np.log2(np.abs(groups).max(-1) / VALUES[-1])).astype(int)
    parts = groups / np.exp2(exponents)[..., None]
    codes = np.abs(np.abs(parts)[..., None] - VALUES).argmin(-1) + 8 * (parts < 0)
    meaning = np.where(codes < 8, 1, -1) * VALUES[codes % 8] * np.exp2(exponents)[..., None]
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return blocks, (exponents + BIAS).astype(np.uint8), meaning.reshape(weight.shape).astype(np.float32)


def write_mxfp4(folder, reference):
    """Write a transformers gpt-oss whose experts are in MXFP4; the model gets the codes' meaning."""
    from safetensors.torch import save_file

    reference.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = MXFP4_CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    tied = {"lm_head.weight"} if reference.config.tie_word_embeddings else set()
    tensors = {}
    for name, tensor in reference.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors |= {} if name in tied else {name: tensor}
            continue
        experts = [random_blocks(expert.t().float().numpy()) for expert in tensor]
        for kind, place in (("blocks", 0), ("scales", 1)):
            tensors[f"{name}_{kind}"] = torch.from_numpy(np.stack([expert[place] for expert in experts]))
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.stack([expert[2].T for expert in experts])))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return reference
