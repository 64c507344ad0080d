"""Make the embedded model: corpus, tokenizer, training, evaluation, and the folder that ships in the package.

python tools/train_tiny_model.py train                  # about half an hour on two cores; writes assets/tiny
python tools/train_tiny_model.py evaluate               # measures the folder; writes the figures of docs/embedded-model.md
python tools/train_tiny_model.py sample --count 20      # shows what the training text looks like
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # read when torch is imported; threads that spin starve a shared machine

from tiny_model.corpus import documents

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "python" / "rustvllm" / "assets" / "tiny"
WORK = ROOT / "target" / "tiny-model"


def main() -> None:
    """Run the chosen command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train the model and write the folder that ships")
    train.add_argument("--steps", type=int, help="optimiser steps (default: the recipe's)")
    train.add_argument("--seed", type=int, help="seed of corpus and weights (default: the recipe's)")
    train.add_argument(
        "--max-minutes", type=float, default=40.0, help="finish early, with a full decay, after this time"
    )
    evaluate = commands.add_parser("evaluate", help="measure the folder")
    evaluate.add_argument("--quick", action="store_true", help="a few prompts only, to try the command")
    for command in (train, evaluate):
        command.add_argument("--out", type=Path, default=ASSETS, help="the model's folder")
        command.add_argument("--work", type=Path, default=WORK, help="folder for logs, checkpoints and records")
    sample = commands.add_parser("sample", help="print some of the training text")
    sample.add_argument("--count", type=int, default=20)
    sample.add_argument("--seed", type=int, default=1)
    sample.add_argument("--held-out", action="store_true", help="show held-out documents instead")
    arguments = parser.parse_args()
    if arguments.command == "sample":
        for document in itertools.islice(documents(arguments.seed, held_out=arguments.held_out), arguments.count):
            print(document.text, end="\n\n")
    elif arguments.command == "train":
        from tiny_model.train import Recipe, make_model, publish
        from tiny_model.train import train as run

        recipe = Recipe()
        recipe = replace(recipe, steps=arguments.steps or recipe.steps, seed=arguments.seed or recipe.seed)
        model, tokenizer, record = run(recipe, arguments.work, make_model, max_minutes=arguments.max_minutes)
        publish(model, tokenizer, arguments.out)
        print(f"wrote {arguments.out}: {record['parameters']:,} parameters, final loss {record['final_loss']}")
    else:
        from tiny_model.evaluate import evaluate as measure

        measure(arguments.out, arguments.work, ROOT / "docs" / "embedded-model.md", quick=arguments.quick)


if __name__ == "__main__":
    main()
