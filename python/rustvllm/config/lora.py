"""``--enable-lora`` and its companions: how many adapters, of which ranks, and which are loaded at startup.

Also ``--merge-lora``, which adds adapters to the weights permanently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rustvllm.config.checkpoint.gguf_file import is_gguf
from rustvllm.config.checkpoint.quantized_folders import read_quantization
from rustvllm.config.hub.adapters import CONFIG_NAME, PICKLES, WEIGHTS_NAME, fetch_adapter, is_hub_name
from rustvllm.exceptions import ConfigError
from rustvllm.parameter_checks import shown

if TYPE_CHECKING:
    from rustvllm.config.engine_config import EngineConfig

MAX_NAME_CHARACTERS: Final = 256
MAX_ADAPTERS: Final = 10_000
"""The most adapters that may be named at startup, or run in a step."""
MAX_RANK: Final = 4096
LORA_DTYPES: Final = ("auto", "float32", "bfloat16")
"""What ``lora_dtype`` may be."""
_KEYS: Final = ("name", "path", "base_model_name")


@dataclass(frozen=True, kw_only=True)
class LoRAModule:
    """An adapter that is loaded at startup.

    Attributes:
        name: What requests call it.
        path: Its folder, absolute.
        base_model_name: What ``/v1/models`` names as its parent; None: the model's first name.
    """

    name: str
    path: str
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        check_adapter_name(self.name)


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Settings of adapters, which requests name.

    Attributes:
        max_loras: Different adapters among the running requests at most.
        max_lora_rank: Largest rank of an adapter's matrices.
        max_cpu_loras: Adapters in memory at most; None: as many as are asked for.
        dtype: What their matrices are kept in; ``auto``: as the model, and in bfloat16 over weights of 8 bits or fewer.
        modules: Adapters to load at startup.
    """

    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    dtype: str = "auto"
    modules: tuple[LoRAModule, ...] = ()

    def __post_init__(self) -> None:
        _require_int("max_loras", self.max_loras, MAX_ADAPTERS)
        _require_int("max_lora_rank", self.max_lora_rank, MAX_RANK)
        if self.dtype not in LORA_DTYPES:
            raise ConfigError(f"lora_dtype must be one of {', '.join(LORA_DTYPES)}, got {self.dtype!r:.200}")
        if self.max_cpu_loras is not None:
            _require_int("max_cpu_loras", self.max_cpu_loras, MAX_ADAPTERS)
            if self.max_cpu_loras < self.max_loras:
                raise ConfigError(f"max_cpu_loras ({self.max_cpu_loras}) must be >= max_loras ({self.max_loras})")
        most = MAX_ADAPTERS if self.max_cpu_loras is None else self.max_cpu_loras
        if len(self.modules) > most:
            advice = "" if self.max_cpu_loras is None else ": raise max_cpu_loras, or name fewer"
            raise ConfigError(
                f"lora_modules names {len(self.modules)} adapters, but memory holds at most {most}{advice}"
            )
        names = [module.name for module in self.modules]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"lora_modules names {twice[0]!r} twice: give each adapter its own name")


def make_lora_config(
    *,
    enable_lora: bool,
    max_loras: int,
    max_lora_rank: int,
    max_cpu_loras: int | None,
    dtype: str,
    modules: Sequence[Any] | None,
    download_dir: Path | None = None,
    may_fetch: bool = True,
) -> LoRAConfig | None:
    """What the arguments ask for; None without ``enable_lora``.

    Args:
        enable_lora: Whether requests may name adapters.
        max_loras: See ``LoRAConfig``, as for the three that follow.
        max_lora_rank: See there.
        max_cpu_loras: See there.
        dtype: See there.
        modules: Adapters to load at startup, as ``name=path`` or objects.
        download_dir: Where to keep what comes from the hub; None: in its cache.
        may_fetch: False checks without the hub: an adapter that is on it keeps its name there as its path.

    Raises:
        ConfigError: A value is out of range, a name is taken or wrong, or a folder is not an adapter's.
        ModelLoadError: An adapter cannot be fetched from the hub.
    """
    if modules is not None and (isinstance(modules, str | Mapping) or not isinstance(modules, Sequence)):
        raise ConfigError(f"lora_modules must be a list, such as ['name=path'], got {modules!r:.200}")
    if not enable_lora:
        if modules:
            raise ConfigError("lora_modules needs enable_lora")
        return None
    return LoRAConfig(
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_cpu_loras=max_cpu_loras,
        dtype=dtype,
        modules=tuple(_module_of(each, download_dir, may_fetch=may_fetch) for each in modules or ()),
    )


def folders_to_merge(paths: Sequence[str] | None, download_dir: Path | None = None) -> tuple[str, ...]:
    """The absolute folders of adapters that are added to the weights while these are loaded.

    Args:
        paths: Their folders, or their names on the hub.
        download_dir: Where to keep what comes from the hub; None: in its cache.

    Raises:
        ConfigError: No list, a folder is not an adapter's, or it is there twice.
        ModelLoadError: One cannot be fetched from the hub.
    """
    if paths is not None and (isinstance(paths, str | Mapping) or not isinstance(paths, Sequence)):
        raise ConfigError(f"merge_lora must be a list of folders, got {paths!r:.200}")
    folders = [str(find_adapter(Path(path).name, path, download_dir)) for path in paths or ()]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise ConfigError(f"merge_lora names {twice[0]} twice: rustvllm merges an adapter only once")
    return tuple(folders)


def check_adapters(config: EngineConfig, lora: LoRAConfig) -> None:
    """Refuse adapters that nothing would compute, or one with the model's name.

    Raises:
        ConfigError: Says what contradicts ``enable_lora``, and what to do.
    """
    model, device = config.model, config.device.device
    if device == "cuda" and (num_ranks := config.parallel.num_ranks) > 1:
        raise ConfigError(
            f"enable_lora is set, but device is cuda and {num_ranks} processes share the model: so far, adapters only "
            "run on one GPU; set tensor_parallel_size and pipeline_parallel_size to 1, or merge the adapter with "
            "merge_lora"
        )
    if model.model_impl == "transformers":
        raise ConfigError(
            f"enable_lora is set, but transformers' modelling code runs {model.architecture}, and its layers cannot "
            "have adapters: leave enable_lora out, or merge the adapter into the checkpoint"
        )
    names = model.served_model_name or (model.model,)
    if taken := [module.name for module in lora.modules if module.name in names]:
        raise ConfigError(
            f"lora_modules: the adapter {taken[0]!r} has the same name as the served model; give it another name"
        )


def check_merging(config: EngineConfig) -> None:
    """Refuse to merge adapters if there are no weights to merge them into.

    Raises:
        ConfigError: Says what contradicts ``merge_lora``, and what to do.
    """
    model = config.model
    refused = {
        "enable_lora is set: adapters that requests name were trained on the model without the merged ones": (
            config.lora is not None
        ),
        "executor is sim, which has no weights": config.sim is not None,
        "pipeline_parallel_size is above 1: an adapter's layers would be in several stages": (
            config.parallel.pipeline_parallel_size > 1
        ),
        "load_format is dummy, which does not read weights": config.load.load_format == "dummy",
        f"transformers' modelling code runs {model.architecture} and reads the weights itself": (
            model.model_impl == "transformers"
        ),
        f"{model.path} is a GGUF file: merge the adapter before you convert the model to GGUF": is_gguf(model.path),
        f"{model.path} has quantised weights, which cannot change: merge the adapter into the checkpoint that was "
        "quantised": not is_gguf(model.path) and read_quantization(model.hf_config, model.path) is not None,
    }
    for reason, is_so in refused.items():
        if is_so:
            raise ConfigError(f"merge_lora is set, but {reason}")


def check_adapter_name(name: object) -> None:
    """Refuse a name that cannot stand for an adapter in requests, flags and logs.

    Raises:
        ConfigError: Says what a name may be.
    """
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARACTERS:
        raise ConfigError(f"an adapter's name must have 1 to {MAX_NAME_CHARACTERS} characters, got {shown(name)}")
    if not name.isprintable() or name != name.strip() or "=" in name:
        raise ConfigError(
            f"an adapter's name must be printable, without = and without spaces around it, got {shown(name)}"
        )
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ConfigError(
            "an adapter's name may contain slashes, but the parts between them must not be empty, . or .., got "
            f"{shown(name)}"
        )


def check_adapter_folder(name: str, path: str | Path) -> Path:
    """The absolute path of a folder that has an adapter's two files.

    Args:
        name: The adapter's, for messages.
        path: Of the folder; ``~`` is the home.

    Raises:
        ConfigError: There is no such folder, or a file is missing.
    """
    try:
        folder = Path(path).expanduser().absolute()
        is_there = folder.is_dir()
        missing = [file for file in (CONFIG_NAME, WEIGHTS_NAME) if not (folder / file).is_file()]
        pickles = [file for file in PICKLES if (folder / file).is_file()]
    except (OSError, RuntimeError, ValueError) as error:  # too long, or ``~user`` of an unknown user
        raise ConfigError(f"adapter {name!r}: the folder {str(path)!r:.200} cannot be read: {error}") from error
    if not is_there:
        raise ConfigError(f"adapter {name!r}: there is no folder {folder}")
    if missing == [WEIGHTS_NAME] and pickles:
        raise ConfigError(
            f"adapter {name!r}: {folder} has {pickles[0]} but no {WEIGHTS_NAME}; rustvllm only loads safetensors, "
            "because a pickle can run code. Save the adapter again with peft's save_pretrained"
        )
    if missing:
        raise ConfigError(f"adapter {name!r}: {folder} has no {missing[0]}; peft's save_pretrained writes that file")
    return folder


def find_adapter(name: str, path: str, download_dir: Path | None = None) -> Path:
    """The absolute folder of an adapter: the one of that path, or else what the hub has under that name.

    Args:
        name: The adapter's, for messages.
        path: Of the folder, or ``owner/name`` on the hub.
        download_dir: Where to keep what comes from the hub; None: in its cache.

    Raises:
        ConfigError: There is no such folder, or a file is missing.
        ModelLoadError: It cannot be fetched from the hub.
    """
    if is_on_hub(path):
        return check_adapter_folder(name, fetch_adapter(path, download_dir))
    before, _, revision = path.partition("@")
    if revision and is_on_hub(before) and not _exists(path):
        raise ConfigError(
            f"adapter {name!r}: {path!r:.200} is not a folder, and a name on the hub takes no revision: leave "
            f"@{revision} out to load the main branch, or download that revision and name its folder"
        )
    return check_adapter_folder(name, path)


def is_on_hub(path: str) -> bool:
    """Whether a path is to be looked for on the hub: it has the form of a name there, and nothing here is called so."""
    return is_hub_name(path) and not _exists(path)


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, or ``~user`` of an unknown user
        return False


def _module_of(given: object, download_dir: Path | None, *, may_fetch: bool) -> LoRAModule:
    """A row of ``lora_modules``: ``name=path``, or an object, as JSON text or a mapping."""
    value = given
    if isinstance(given, str):
        if given.lstrip().startswith("{"):
            try:
                value = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"lora_modules: {given!r:.200} is not JSON: {error}") from error
        else:
            name, equals, path = given.partition("=")
            if not (name and equals and path):
                raise ConfigError(
                    f"lora_modules: expected name=path, or JSON with {', '.join(_KEYS)}, got {given!r:.200}"
                )
            value = {"name": name, "path": path}
    if isinstance(value, LoRAModule):
        return value
    if not isinstance(value, Mapping) or not {"name", "path"} <= set(value) <= set(_KEYS):
        raise ConfigError(
            f"lora_modules: an object must have name and path, and may have base_model_name, got {given!r:.200}"
        )
    for key in _KEYS:
        if not isinstance(value.get(key), str if key != "base_model_name" else str | None):
            raise ConfigError(f"lora_modules: {key} must be a string, got {value.get(key)!r:.100}")
    check_adapter_name(value["name"])
    path = value["path"]
    if may_fetch or not is_on_hub(path):
        path = str(find_adapter(value["name"], path, download_dir))
    return LoRAModule(name=value["name"], path=path, base_model_name=value.get("base_model_name"))


def _require_int(name: str, value: object, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ConfigError(f"{name} must be an integer between 1 and {high}, got {value!r}")
