"""The tokenizer of the checkpoints that scripts make, where no ``--tokenizer`` names another one."""

import argparse
from pathlib import Path

from rustvllm.config.hub import embedded_model_path

DATA = Path(__file__).resolve().parents[3] / "shared/data"
FILE = "tokenizer.json"


def tokenizer_folder(name: str) -> Path:
    """The folder of a tokenizer.

    Args:
        name: A folder of reference data, for example ``gpt2-tokenizer``.

    Returns:
        That folder if the reference data are next to this clone, otherwise the embedded model's. The embedded one has
        fewer tokens: ids above them have no text, and what a script computes stays the same.
    """
    folder = DATA / name
    return folder if (folder / FILE).is_file() else embedded_model_path()


def folder_with_tokenizer(text: str) -> Path:
    """The value of a ``--tokenizer`` for which no other tokenizer will do.

    Raises:
        argparse.ArgumentTypeError: If the folder has no tokenizer.json.
    """
    folder = Path(text)
    if not (folder / FILE).is_file():
        raise argparse.ArgumentTypeError(f"{folder} has no {FILE}; name a folder that has GPT-2's")
    return folder
