"""What loading takes at its worst: the weights, and no more than one tensor in addition.

Measured in a process of its own, as its highest resident memory above what it had with torch and the loader imported.
"""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

MIB = 1 << 20
SLACK = 4 * MIB
"""What the interpreter, the allocator and a first use of torch's operations take besides."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64,
}  # fmt: skip

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from rustvllm.config import LoadConfig
from rustvllm.config.model_folder import read_model_config
from rustvllm.model_loader import load_model

def status(name):
    [line] = [line for line in open("/proc/self/status") if line.startswith(name + ":")]
    return int(line.split()[1]) * 1024

config = read_model_config(Path(sys.argv[1]), model="m")
torch.randn(64, 64, dtype=torch.float32).to(torch.bfloat16).float() @ torch.zeros(64, 64)  # libraries set up
for dtype in (torch.bfloat16, torch.float32):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest from now on
    before = status("VmRSS")
    model = load_model(config, LoadConfig(), dtype, torch.device("cpu"), 1 << 40)
    peak, after = status("VmHWM") - before, status("VmRSS") - before
    weights = sum(parameter.nbytes for parameter in model.parameters())
    del model
    print(json.dumps({"peak": peak, "after": after, "weights": weights, "itemsize": dtype.itemsize}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of 34 MiB in bfloat16, in two shards."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hidden, inner, vocab = (CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{name}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{name}mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{name}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    files = {"a.safetensors": list(shapes)[::2], "b.safetensors": list(shapes)[1::2]}
    for file, names in files.items():
        save_file({name: torch.ones(shapes[name], dtype=torch.bfloat16) for name in names}, folder / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_no_more_than_the_weights_and_one_tensor(folder):
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [case["itemsize"] for case in found] == [2, 4]
    for case in found:
        largest = CONFIG["vocab_size"] * CONFIG["hidden_size"] * case["itemsize"]
        assert case["weights"] > 3 * largest, "too small to say anything"
        assert 0.9 * case["weights"] < case["after"] <= 1.05 * case["weights"] + SLACK
        assert case["peak"] <= case["weights"] + largest + SLACK
