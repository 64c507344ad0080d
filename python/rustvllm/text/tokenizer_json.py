"""Finds a model's ``tokenizer.json``: next to its weights, or converted once from older files and kept in the cache.

The conversion needs transformers, which imports torch. It therefore runs in a process of its own
(``python -m rustvllm.text.tokenizer_converter``), and later starts read the resulting file.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from rustvllm import envs
from rustvllm.config.checkpoint.lfs_pointer import what_to_do
from rustvllm.exceptions import ModelLoadError
from rustvllm.logger import init_logger

logger = init_logger(__name__)
T = TypeVar("T")

MAX_FILE_BYTES: Final = 256 << 20
"""Largest tokenizer file that is read; the largest of known models have about a tenth of this."""
CONVERSION_TIMEOUT: Final = 120.0
"""Seconds that the conversion may take; most of its time is the import of torch."""
_LAYOUT: Final = 1  # version of the converter's output; a new version makes new cache entries
_MAX_MESSAGE: Final = 2000
_VOCABULARIES: Final = ("merges.txt", "tokenizer.model", "vocab.json", "vocab.txt")
_SETTINGS: Final = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
_INSTEAD: Final = (
    "Give another tokenizer with tokenizer=…, save a tokenizer.json next to the model "
    "(transformers: AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(…)), or pass "
    "skip_tokenizer_init=True and send token ids"
)


def load_tokenizer_json(folder: Path, read: Callable[[Path], T]) -> T:
    """Call ``read`` with the ``tokenizer.json`` of a model folder, which is converted first if there is none.

    Args:
        folder: The model's folder.
        read: Reads a tokenizer from a path; raises if the file is not a tokenizer.

    Returns:
        What ``read`` returns.

    Raises:
        ModelLoadError: There is no tokenizer, or it cannot be read or converted. The message names the file, and the
            class for a conversion.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        check_size(path)
        try:
            return read(path)
        except Exception as error:
            raise ModelLoadError(f"cannot read the tokenizer {path}: {error}{what_to_do(path)}") from error
    files = [folder / name for name in _VOCABULARIES if (folder / name).is_file()]
    if not files:
        raise ModelLoadError(
            f"no tokenizer in {folder}: there is neither tokenizer.json nor {', '.join(_VOCABULARIES)}. {_INSTEAD}"
        )
    inputs = [*files, *(folder / name for name in _SETTINGS if (folder / name).is_file())]
    for file in inputs:
        check_size(file)
    class_name = _class_name(folder, files)
    directory = _cache_directory()
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="rustvllm-tokenizer-") as temporary:
            return read(_convert(folder, files, class_name, Path(temporary) / "tokenizer.json"))
    cached = directory / f"{_digest(inputs, class_name)}.json"
    if cached.is_file():
        try:
            return read(cached)
        except Exception as error:  # noqa: BLE001 -- a file that was truncated or changed is converted again
            logger.warning("the cached tokenizer %s cannot be read; converting it again: %s", cached, error)
    return read(_convert(folder, files, class_name, cached))


def check_size(path: Path) -> None:
    """Refuse a file that is too large to belong to a tokenizer.

    Raises:
        ModelLoadError: The file is larger than ``MAX_FILE_BYTES``.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ModelLoadError(f"{path} has {size} bytes; the limit for a tokenizer file is {MAX_FILE_BYTES}")


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; ``{}`` if there is no such file.

    Raises:
        ModelLoadError: The file is too large, cannot be read, or does not hold a JSON object.
    """
    if not path.is_file():
        return {}
    check_size(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"cannot read {path}: it must hold a JSON object, not {type(value).__name__}")
    return value


def _class_name(folder: Path, files: Sequence[Path]) -> str:
    """The tokenizer class of transformers: the one that the model names, else the one that reads such files."""
    named = read_object(folder / "tokenizer_config.json").get("tokenizer_class")
    generic = (None, "", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")
    if isinstance(named, str) and named not in generic:
        return named
    names = {file.name for file in files}
    if "tokenizer.model" in names:
        return "LlamaTokenizer"
    return "GPT2Tokenizer" if "merges.txt" in names else "BertTokenizer"


def _cache_directory() -> Path | None:
    """The folder for converted tokenizers; None if it cannot be used, or if other users can write to it."""
    directory = envs.cache_dir() / "tokenizers"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            # A user with write access here could put any text into every prompt.
            logger.warning("other users can write to %s: not keeping converted tokenizers there", directory)
            return None
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        logger.warning("cannot keep converted tokenizers in %s (set RUSTVLLM_CACHE): %s", directory, error)
        return None


def _digest(inputs: Sequence[Path], class_name: str) -> str:
    """Hash everything that the result of a conversion depends on; the name of its cache entry."""
    parts: list[tuple[str, str]] = [("layout", str(_LAYOUT)), ("class", class_name)]
    for package in ("transformers", "tokenizers"):
        try:
            parts.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            parts.append((package, ""))
    for path in inputs:
        with path.open("rb") as file:
            parts.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _convert(folder: Path, files: Sequence[Path], class_name: str, target: Path) -> Path:
    """Convert the files in another process and write the result to ``target``, completely or not at all.

    Returns:
        ``target``.

    Raises:
        ModelLoadError: The conversion failed or took too long.
    """
    names = ", ".join(file.name for file in files)
    logger.info("%s has no tokenizer.json: converting %s with transformers' %s", folder, names, class_name)
    failed = f"cannot convert the tokenizer in {folder} ({names}) with transformers' {class_name}"
    handle, temporary = tempfile.mkstemp(prefix=".converting-", suffix=".json", dir=target.parent)  # mode 600
    os.close(handle)
    try:
        command = [
            sys.executable,
            "-m",
            "rustvllm.text.tokenizer_converter",
            str(folder.resolve()),
            class_name,
            temporary,
        ]
        # Nothing is downloaded: a missing file is an error.
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        answer = _run([*command, str(CONVERSION_TIMEOUT)], {**os.environ, **offline}, failed)
        if answer.get("ok") is not True:
            said = str(answer.get("error", "the process ended without a word"))[:_MAX_MESSAGE]
            raise ModelLoadError(f"{failed}: {said}.{_missing_packages(files)} {_INSTEAD}")
        check_size(Path(temporary))
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def _run(command: Sequence[str], environment: dict[str, str], failed: str) -> dict[str, Any]:
    """Run the converter and return the JSON object that it printed last; else an object with the reason as ``error``.

    Raises:
        ModelLoadError: The converter cannot be started, or took too long.
    """
    try:
        done = subprocess.run(  # noqa: S603 -- this interpreter, a module of this package, paths as arguments
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=CONVERSION_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise ModelLoadError(f"{failed}: it took longer than {CONVERSION_TIMEOUT:.0f} seconds. {_INSTEAD}") from None
    except OSError as error:
        raise ModelLoadError(f"{failed}: the process could not be started: {error}") from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    if isinstance(answer, dict):
        return answer
    logger.debug("the converter said: %s", done.stderr.decode(errors="replace")[-_MAX_MESSAGE:])
    if done.returncode < 0:
        return {"error": f"the process was ended by {signal.Signals(-done.returncode).name}"}
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return {"error": "; ".join([f"the process ended with code {done.returncode}", *last])}


def _missing_packages(files: Sequence[Path]) -> str:
    if not any(file.name == "tokenizer.model" for file in files):
        return ""
    missing = [
        package
        for module, package in (("sentencepiece", "sentencepiece"), ("google.protobuf", "protobuf"))
        if not _is_installed(module)
    ]
    return f" For tokenizer.model it needs the packages {' and '.join(missing)}." if missing else ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
