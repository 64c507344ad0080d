"""Train a small Llama, to measure what rounded weights and activations cost in a model of that kind.

    python tools/train_llama.py --out FOLDER [--max-minutes 40] [--steps 4000] [--threads 2]
    python benches/python/quantization_cost.py --model FOLDER --text FOLDER/held-out.txt

The corpus is that of the embedded model, whose training loop this uses. The model is 256 wide, with 6 layers and 4 heads
of which 2 have keys; the folder is in the layout of the Hugging Face hub, in float32, and has some text that the model
was not trained on. It is written where it is asked for and is no part of the package.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported, as in train_tiny_model.py

from tiny_model.corpus import documents
from tiny_model.tokenizer import stop_token_ids, tokenizer_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    from tiny_model.train import Recipe

WIDTH = 256
NUM_KV_HEADS = 2
NUM_HELD_OUT = 150
"""Documents of the text to measure with: some 15,000 tokens."""


def make_llama(recipe: Recipe, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A freshly initialised Llama of the recipe's shape, whose head is its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    stop_ids = stop_token_ids(tokenizer)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.n_embd,
        intermediate_size=recipe.n_embd * 11 // 4,
        num_hidden_layers=recipe.n_layer,
        num_attention_heads=recipe.n_head,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=recipe.n_positions,
        bos_token_id=stop_ids[0],
        eos_token_id=stop_ids[0],
        pad_token_id=stop_ids[0],
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--steps", type=int, default=4000, help="optimiser steps of 2,048 tokens")
    parser.add_argument("--max-minutes", type=float, default=40.0, help="finish early, with a full decay, after this")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    from tiny_model.train import Recipe, train

    recipe = replace(Recipe(), n_embd=WIDTH, n_head=4, steps=arguments.steps, threads=arguments.threads)
    model, tokenizer, record = train(recipe, arguments.out, make_llama, max_minutes=arguments.max_minutes)
    model.save_pretrained(arguments.out)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    config = tokenizer_config(recipe.n_positions)
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    texts = itertools.islice(documents(recipe.seed, held_out=True), NUM_HELD_OUT)
    (arguments.out / "held-out.txt").write_text("".join(document.text for document in texts))
    print(f"wrote {arguments.out}: {record['parameters']:,} parameters, final loss {record['final_loss']}")


if __name__ == "__main__":
    main()
