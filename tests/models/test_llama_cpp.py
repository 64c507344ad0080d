"""Greedy ids out of a GGUF file are those of llama.cpp with the same file, wherever its margin is clear.

It needs an interpreter that has ``llama_cpp`` (``RUSTVLLM_TEST_LLAMA_CPP_PYTHON``); how to make its environment:
docs/benchmarks/engines.md.
"""

import json
import logging
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from checkpoints import GEMMA, GPT2, GPT_OSS, LLAMA, LLAMA3_ROPE, make, prompts

from rustvllm import LLM, SamplingParams

gguf_files = pytest.importorskip("gguf_files", reason="the gguf package is not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

logger = logging.getLogger(__name__)
PROGRAM = Path(__file__).parent / "llama_cpp_logits.py"
MARGIN = 1e-2
VOCABULARY = 512
LENGTHS = (1, 2, 5, 9, 17, 30, 45, 60)
NUM_NEW = 48
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
GEMMA_SIZES = GEMMA | SIZES | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 16}
GPT_OSS_SIZES = {
    "head_dim": 64, "sliding_window": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
FAMILIES = {
    # name -> kind of checkpoint, what its configuration has besides
    "gpt2": ("gpt2", GPT2 | {"vocab_size": VOCABULARY, "n_embd": 256, "n_head": 8}),
    "llama": ("llama", LLAMA | SIZES),
    "llama3": ("llama", LLAMA | SIZES | {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", LLAMA | SIZES),
    "qwen3": ("qwen3", LLAMA | SIZES | {"head_dim": 64, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", GEMMA_SIZES),
    # Every sixth layer sees all tokens: llama.cpp knows no other order.
    "gemma3": ("gemma3", GEMMA_SIZES | {"num_hidden_layers": 7, "layer_types": None, "sliding_window_pattern": 6}),
    "gpt-oss": ("gpt-oss", GPT_OSS | SIZES | GPT_OSS_SIZES),
    "phi3": ("phi3", LLAMA | SIZES),  # without a window, which llama.cpp leaves out of this family
}


def write(path, reference, kind):
    """With the reference's numbers, which become the file's."""

    def vocabulary(writer):
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(VOCABULARY)

    def kind_of(name):  # positions as llama.cpp's converter has them
        return "F32" if name.startswith("position_embd") else kind

    gguf_files.write_model(path, reference, kind_of, metadata=vocabulary)


def of_llama_cpp(path, sequences):
    """For each sequence the likeliest token after each of its own, and the margin."""
    python = os.environ.get("RUSTVLLM_TEST_LLAMA_CPP_PYTHON")
    if not python:
        pytest.skip("no llama.cpp to compare with: RUSTVLLM_TEST_LLAMA_CPP_PYTHON names an interpreter that has it")
    order = json.dumps({"file": str(path), "sequences": sequences}) + "\n"
    ended = subprocess.run([python, str(PROGRAM)], input=order, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout)


def greedy(path, inputs):
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    with LLM(str(path), skip_tokenizer_init=True, max_model_len=128, num_gpu_blocks_override=128) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in inputs], params, use_tqdm=False)
    outputs = [list(each.outputs[0].token_ids) for each in found]
    assert len(Counter(token for output in outputs for token in output)) > 30, "it repeats itself"
    return outputs


def of_outputs(inputs, likeliest):
    """What was found after the places where tokens were drawn, one after the other."""
    return [each for ids, found in zip(inputs, likeliest, strict=True) for each in found[len(ids) - 1 : -1]]


def clearly_different(chosen, likeliest):
    """Margins of the places where another token was chosen, and the margin is clear; how many are clear."""
    pairs = list(zip(chosen, likeliest, strict=True))
    clear = sum(margin > MARGIN for _, (_, margin) in pairs)
    assert clear > 0.9 * len(pairs), "margins too small to say anything"
    return [margin for token, (best, margin) in pairs if margin > MARGIN and token != best]


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_llama_cpps_wherever_its_margin_is_clear(family, kind, tmp_path, monkeypatch):
    """Numbers are the file's, activations are not rounded: llama.cpp does the latter too where weights are F16.

    It rounds what it gives experts in F16, so it gets these in F32.
    """
    path = theirs = tmp_path / f"m-{kind}.gguf"
    reference = make(*FAMILIES[family])
    write(path, reference, kind)
    if kind == "Q8_0" or family == "gpt-oss":
        theirs = tmp_path / "m-F32.gguf"
        write(theirs, reference, "F32")
    monkeypatch.setenv("RUSTVLLM_ACTIVATIONS", "float")
    inputs = prompts(VOCABULARY, LENGTHS)
    outputs = greedy(path, inputs)
    likeliest = of_llama_cpp(theirs, [ids + output for ids, output in zip(inputs, outputs, strict=True)])
    chosen = [token for output in outputs for token in output]
    assert not clearly_different(chosen, of_outputs(inputs, likeliest))


@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_activations_differ_from_llama_cpps_no_more_than_these_from_its_own(family, tmp_path):
    """Both round what meets Q8_0 to 8 bits in blocks of 32, llama.cpp with scales of 16 bits.

    A number near the middle of two is rounded the one way here and the other way there, and layers amplify that, so no
    two programs agree wherever a margin exceeds 1e-2. llama.cpp with the same numbers in F32, which it does not round,
    says how much that is.
    """
    path, exact = tmp_path / "m-Q8_0.gguf", tmp_path / "m-F32.gguf"
    reference = make(*FAMILIES[family])
    write(path, reference, "Q8_0")
    write(exact, reference, "F32")
    inputs = prompts(VOCABULARY, LENGTHS)
    outputs = greedy(path, inputs)
    sequences = [ids + output for ids, output in zip(inputs, outputs, strict=True)]
    rounded, plain = (of_outputs(inputs, of_llama_cpp(file, sequences)) for file in (path, exact))
    ours = clearly_different([token for output in outputs for token in output], rounded)
    theirs = clearly_different([token for token, _ in plain], rounded)
    logger.info("%s: of %d clear tokens %d differ, of llama.cpp's own %d", family, len(rounded), len(ours), len(theirs))
    assert len(ours) <= len(theirs) + 5
    assert max(ours, default=0.0) <= 2 * max(theirs, default=0.0) + MARGIN
