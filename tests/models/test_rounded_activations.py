"""8-bit weights that meet rounded activations, against the same weights with activations as they are."""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import LLAMA, make
from naive_schedule import NaiveEngine, Request
from tokenizers import Tokenizer

from rustvllm import _core
from rustvllm.attention.cpu_backend import CPUAttentionBackend
from rustvllm.attention.metadata import AttentionMetadata
from rustvllm.config import LoadConfig
from rustvllm.config.model_folder import read_model_config
from rustvllm.layers.cpu.linear import CoreLinear
from rustvllm.layers.cpu.options import LinearOptions
from rustvllm.layers.cpu.packer import LinearPacker
from rustvllm.layers.linear import Linear
from rustvllm.model_loader import load_model

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "python" / "rustvllm" / "assets" / "tiny"
NUM_TOKENS = 256
NUM_WINDOWS = 16
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def windows():
    """Token ids of documents that the embedded model was not trained on."""
    sys.path.insert(0, str(REPOSITORY / "tools"))
    try:
        from tiny_model.corpus import documents
    finally:
        sys.path.remove(str(REPOSITORY / "tools"))
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    texts = (document.text for document in documents(5, held_out=True))
    ids = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    flat = list(itertools.islice(itertools.chain.from_iterable(ids), NUM_WINDOWS * NUM_TOKENS))
    return torch.tensor(flat, dtype=torch.int32).view(NUM_WINDOWS, NUM_TOKENS)


def load(folder, options, *, max_model_len=512):
    config = read_model_config(folder, model=str(folder), max_model_len=max_model_len)

    def packer(outline):
        return LinearPacker(_core.CpuThreads(2), options, outline, outline.tied_embedding, 0)

    return load_model(config, LoadConfig(), torch.float32, torch.device("cpu"), 1 << 40, packer)


def kinds(model):
    layers = [module.kernel for module in model.modules() if isinstance(module, Linear)]
    kernels = [*layers, *([model.head_kernel] if model.lm_head is None else [])]
    return {kernel.packed.kind if isinstance(kernel, CoreLinear) else None for kernel in kernels}


@torch.inference_mode()
def log_probabilities(model, windows):
    """Of every token but the first of each window, and all that could have been: ``[windows, tokens − 1, vocab]``."""
    spec = model.kv_cache_spec
    num_blocks = NUM_TOKENS // BLOCK_SIZE
    table = torch.arange(1, num_blocks + 1, dtype=torch.int32)[None]
    positions = torch.arange(NUM_TOKENS, dtype=torch.int32)
    starts = torch.tensor([0, NUM_TOKENS], dtype=torch.int32).numpy()
    caches = [torch.zeros(spec.layer_shape(num_blocks + 1, BLOCK_SIZE)) for _ in range(spec.num_layers)]
    found = []
    for window in windows:
        metadata = AttentionMetadata(BLOCK_SIZE, table, positions + BLOCK_SIZE, starts, starts[1:])
        plan = CPUAttentionBackend(1).plan(metadata)
        hidden = model(window, positions, caches, plan)
        found.append(model.compute_logits(hidden)[:-1].double().log_softmax(-1))
    return torch.stack(found)


def perplexity(logprobs, windows):
    return math.exp(-float(logprobs.gather(2, windows[:, 1:, None].long()).mean()))


@pytest.mark.parametrize("group_size", [None, 32])
def test_the_embedded_model_hardly_changes(windows, group_size):
    exact = load(FOLDER, LinearOptions("core", "int8", group_size))
    rounded = load(FOLDER, LinearOptions("core", "int8", group_size, round_activations=True))
    assert kinds(exact) == {"int8"}
    assert kinds(rounded) == {"w8a8"}
    expected, found = log_probabilities(exact, windows), log_probabilities(rounded, windows)
    assert not torch.equal(expected, found)
    assert perplexity(found, windows) <= 1.005 * perplexity(expected, windows)
    assert float((found.argmax(-1) == expected.argmax(-1)).double().mean()) >= 0.98


def test_the_logits_of_a_llama_stay_close(tmp_path):
    make("llama", LLAMA | {"hidden_size": 64, "intermediate_size": 96}).save_pretrained(tmp_path)
    prompt = torch.randint(97, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    logits = []
    for rounds in (False, True):
        model = load(tmp_path, LinearOptions("core", "int8", round_activations=rounds), max_model_len=128)
        assert kinds(model) == {"w8a8" if rounds else "int8"}
        [request] = NaiveEngine(model, chunk=7).run([Request(prompt, 1)])
        logits.append(request.logits[0])
    exact, rounded = logits
    assert 0 < float((rounded - exact).abs().max()) < 0.05 * float(exact.abs().max())
