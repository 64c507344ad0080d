"""Converts an older tokenizer: ``python -m rustvllm.text.tokenizer_converter FOLDER CLASS TARGET SECONDS``.

Only :mod:`rustvllm.text.tokenizer_json` starts this program. It imports transformers and writes the result to
``TARGET``. The last line of its output is the outcome, a JSON object: ``{"ok": true}`` or ``{"error": …}``. It ends
about ``SECONDS`` after its start in any case, even if its parent has ended.
"""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion that the arguments describe.

    Returns:
        The exit code: 0 if ``TARGET`` was written, else 1.
    """
    folder, class_name, target, seconds = sys.argv[1:] if argv is None else argv
    signal.alarm(int(float(seconds)) + 1)  # SIGALRM has no handler here, so it ends the process
    try:
        text = convert(folder, class_name)
        Path(target).write_text(text, encoding="utf-8")
    except Exception as error:  # noqa: BLE001 -- reported to the parent
        _say(error=f"{type(error).__name__}: {error}")
        return 1
    _say(ok=True)
    return 0


def convert(folder: str, class_name: str) -> str:
    """Convert a tokenizer; returns the content of a ``tokenizer.json``.

    Args:
        folder: Folder with the files that the class reads.
        class_name: A tokenizer class of transformers; its fast version is used if there are two.

    Raises:
        ValueError: transformers has no such class, the class has no fast version, or a file that it reads is missing.
        Exception: transformers cannot read the files.
    """
    import transformers

    stem = class_name.removesuffix("Fast")
    named = [getattr(transformers, name, None) for name in (f"{stem}Fast", stem)]
    known = [found for found in named if isinstance(found, type)]
    if not known:
        raise ValueError(
            f"{class_name} is not a class of transformers {transformers.__version__}; rustvllm does not run a model's "
            "own tokenizer code"
        )
    fast = [found for found in known if issubclass(found, transformers.PreTrainedTokenizerFast)]
    if not fast:
        raise ValueError(
            f"{class_name} has no fast version; classes that have one include GPT2Tokenizer, LlamaTokenizer, "
            "Qwen2Tokenizer, GemmaTokenizer and BertTokenizer"
        )
    # If the files are missing, transformers returns a tokenizer with an empty vocabulary instead of an error.
    wanted = {name for key, name in fast[0].vocab_files_names.items() if key != "tokenizer_file"}
    if missing := sorted(name for name in wanted if not Path(folder, name).is_file()):
        raise ValueError(f"{class_name} needs {', '.join(sorted(wanted))}, but {', '.join(missing)} is missing")
    tokenizer = fast[0].from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    text: str = tokenizer.backend_tokenizer.to_str()
    return text


def _say(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    sys.exit(main())
