"""Quantised folders behind a server and in ``LLM``: the tokens of the model that their numbers mean."""

import copy
import json

import httpx
import numpy as np
import pytest
import torch
from server_process import REAL, ServerProcess

from quantized_files import awq, meaning, packed, random_layer, write_folder
from rustvllm.attention.metadata import KVCacheSpec

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}Once"
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": ["mlp"],
}  # fmt: skip
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True}
PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"weights": WEIGHTS | {"strategy": "group", "group_size": 32}, "targets": ["Linear"]},
        "group_1": {"weights": WEIGHTS | {"strategy": "channel"}, "targets": ["re:.*down_proj"]},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def make(shared_dir, tmp_path_factory):
    """Writes a quantised folder of the small model, with tokenizer and template; returns it with the reference."""
    import transformers

    source = shared_dir / "data/stories260K/hf"
    original = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="float32").eval()

    def write(config, lay_out, *, symmetric, skip=lambda _: False):
        rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("quantized")

        def make_layer(name, weight):
            group_size = 32 if weight.shape[1] % 32 == 0 else -1
            parts = random_layer(rng, weight, 4, group_size, symmetric=symmetric)
            return lay_out(name, *parts), meaning(*parts)

        reference = write_folder(folder, copy.deepcopy(original), config, make_layer, skip=skip)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            if (source / name).is_file():
                (folder / name).write_bytes((source / name).read_bytes())
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
        return folder, reference

    return write


def expected_text(folder, reference, prompt, count):
    from rustvllm.text.tokenizer import Tokenizer

    ids = reference.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :]
    return Tokenizer.from_folder(folder).decode(ids.tolist())


def test_a_chat_with_an_awq_folder(make):
    folder, reference = make(AWQ, awq, symmetric=False, skip=lambda name: "mlp" in name)
    command = [*REAL, str(folder), "--quantization", "awq"]
    with ServerProcess(command, RUSTVLLM_ACTIVATIONS="float") as server, httpx.Client() as client:
        server.wait_until_ready()
        messages = [{"role": "user", "content": "A story."}]
        answer = client.post(
            f"{server.url}/v1/chat/completions", json={"messages": messages, "max_tokens": 24}, timeout=60
        ).json()
        rendered = client.post(f"{server.url}/tokenize", json={"messages": messages}, timeout=60).json()
        lines = list(server.lines)
    assert "error" not in answer, answer
    assert any("weights of AWQ-4 (20); 10 dense layers keep the checkpoint's integers" in line for line in lines), lines
    text = answer["choices"][0]["message"]["content"]
    assert len(text) > 20
    assert text.strip() == expected_text(folder, reference, rendered["tokens"], 24).strip()


def test_llm_with_a_compressed_tensors_folder(make, monkeypatch):
    from rustvllm import LLM, SamplingParams

    monkeypatch.setenv("RUSTVLLM_ACTIVATIONS", "float")
    folder, reference = make(PACKED, packed, symmetric=True)
    llm = LLM(str(folder), max_num_seqs=4)
    (answer,) = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=24))
    text = answer.outputs[0].text
    assert len(text) > 20
    assert text.strip() == expected_text(folder, reference, list(answer.prompt_token_ids), 24).strip()


def test_inspect_says_what_it_is(make, capsys):
    from rustvllm.cli.main import main

    folder, reference = make(AWQ, awq, symmetric=False, skip=lambda name: "mlp" in name)
    assert main(["inspect", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["quantization"] == "AWQ of 4 bits, groups of 32"
    assert facts["parameters"] == sum(p.numel() for p in reference.parameters())
    assert set(facts["forms"]) == {"awq 4 bits", "F32"}
    quantised = [p.numel() for name, p in reference.named_parameters() if "self_attn" in name]
    # Nibbles, and for each group of 32 a scale of 16 bits and a zero point of 8.
    saved = 4 * sum(quantised) - sum(quantised) * (1 / 2 + 3 / 32)
    # The head is the embedding, or one of its own.
    dense = 4 * facts["parameters"]
    assert facts["weights_bytes"]["float32"] == pytest.approx(dense - saved, rel=0.01)
    sizes, [(length, caches)] = reference.config, facts["kv_cache_bytes"].items()
    head_dim = sizes.hidden_size // sizes.num_attention_heads
    spec = KVCacheSpec(sizes.num_hidden_layers, sizes.num_key_value_heads, head_dim)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8_per_token_head": torch.int8}
    assert caches == {name: spec.bytes_per_block(int(length), dtype) for name, dtype in dtypes.items()}
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "(AWQ of 4 bits, groups of 32)" in printed
    assert "--kv-cache-dtype int8_per_token_head" in printed
