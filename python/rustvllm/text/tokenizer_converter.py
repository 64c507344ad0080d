"""Converts an older tokenizer: ``python -m rustvllm.text.tokenizer_converter FOLDER CLASS TARGET SECONDS``.

Started by :mod:`rustvllm.text.tokenizer_json` alone. It imports transformers, writes a file to ``TARGET``, and
says on its last line of output how it went, as a JSON object: ``{"ok": true}`` or ``{"error": …}``. It ends after
``SECONDS`` whatever happens, so that nothing is left of it when its parent has gone.
"""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Convert.

    Returns:
        The exit code: 0 when ``TARGET`` is written, else 1.
    """
    folder, class_name, target, seconds = sys.argv[1:] if argv is None else argv
    signal.alarm(int(float(seconds)) + 1)  # ends the process, which has no handler for it
    try:
        text = convert(folder, class_name)
        Path(target).write_text(text, encoding="utf-8")
    except Exception as error:  # noqa: BLE001 -- said to the parent
        _say(error=f"{type(error).__name__}: {error}")
        return 1
    _say(ok=True)
    return 0


def convert(folder: str, class_name: str) -> str:
    """The content of a ``tokenizer.json``.

    Args:
        folder: Holds the files that the class reads.
        class_name: A tokenizer class of transformers; its fast form is taken where there are two.

    Raises:
        ValueError: The class is not one of transformers, or has no fast form, or a file that it reads is missing.
        Exception: Whatever transformers says of the files.
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
    # Without its files transformers gives a tokenizer that knows no words, and says nothing.
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
