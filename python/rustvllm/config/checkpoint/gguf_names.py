"""Chooses one of several GGUF files, by its name or by the label of its quantisation, such as ``Q4_K_M``."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from rustvllm.exceptions import ModelNotFoundError

_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_LABEL: Final = re.compile(r"[.\-_]((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|B?F16|F32|FP16|FP32))$", re.IGNORECASE)
_NAME_AND_LABEL: Final = re.compile(r"(.+):([\w\-]+)")
_MAX_NAMED: Final = 12


def split_label(name: str) -> tuple[str, str | None]:
    """``owner/name:Q4_K_M`` → ``owner/name`` and ``Q4_K_M``; None without a label."""
    match = _NAME_AND_LABEL.fullmatch(name)
    return (match[1], match[2]) if match else (name, None)


def choose_file(files: Iterable[str], label: str | None, where: str) -> str:
    """The model's file, or the first of its files.

    Args:
        files: Names below a folder or a repository; others than GGUF models are passed over.
        label: Of the quantisation; None: there must be one model.
        where: The folder or the repository, for messages.

    Raises:
        ModelNotFoundError: None or several are meant; lists what there is.
    """
    names = sorted(files)
    first = [file for file in names if _is_first(file)]
    if not first:
        later = next((file for file in names if _PART.search(file)), None)
        if later is not None:
            raise ModelNotFoundError(
                f"{where} has {later}, but the first file, {parts_of(later)[0]}, is missing: fetch it"
            )
        raise ModelNotFoundError(f"{where} has no GGUF file that holds a model")
    if label is not None:
        first_of_label = [file for file in first if label_of(file).lower() == label.lower()]
        if not first_of_label:
            raise ModelNotFoundError(f"{where} has no GGUF file with quantisation {label!r}; it has {_listed(first)}")
        first = first_of_label
    if len(first) > 1:
        example = label_of(first[0])
        hint = f"{where}:{example}" if label is None and example else first[0]
        raise ModelNotFoundError(f"{where} has several GGUF files ({_listed(first)}); name one, such as {hint}")
    return first[0]


def advice(files: Iterable[str], where: str) -> str:
    """The end of a message about a place that has GGUF files, but was not named as one; empty if it has none."""
    first = sorted(file for file in files if _is_first(file))
    if not first:
        return ""
    label = label_of(first[0])
    return (
        f"; it has GGUF files ({_listed(first)}): name one, such as {where}{f':{label}' if label else f'/{first[0]}'}"
    )


def label_of(file: str) -> str:
    """The label in a file's name; empty without one."""
    stem = re.sub(r"\.gguf$", "", _PART.sub(".gguf", file), flags=re.IGNORECASE)
    match = _LABEL.search(stem)
    return match[1] if match else ""


def parts_of(file: str) -> list[str]:
    """All files of the model whose first one this is."""
    match = _PART.search(file)
    if match is None:
        return [file]
    start, count = file[: match.start()], int(match[2])
    return [f"{start}-{part:05}-of-{match[2]}.gguf" for part in range(1, count + 1)]


def _is_first(file: str) -> bool:
    name = file.rpartition("/")[2].lower()
    if not name.endswith(".gguf") or name.startswith("mmproj") or "imatrix" in name:
        return False
    match = _PART.search(name)
    return match is None or int(match[1]) == 1


def _listed(files: Sequence[str]) -> str:
    more = f" and {len(files) - _MAX_NAMED} more" if len(files) > _MAX_NAMED else ""
    return ", ".join(label_of(file) or file for file in files[:_MAX_NAMED]) + more
