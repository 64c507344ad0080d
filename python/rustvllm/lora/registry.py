"""``AdapterRegistry``: which adapters a front end can name, and what an engine calls each.

The engine knows an adapter by a number that no other ever has: that of a row in ``LoRAConfig.modules``, from 1 on, or a
random one where it is loaded later. The number is in the hash of a request's first block, so cached blocks of one
adapter, or of what was loaded under its name before, are never another's.
"""

import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from rustvllm.config.hub.adapters import is_hub_name
from rustvllm.config.hub.storage import is_snapshot_of
from rustvllm.config.lora import LoRAConfig, find_adapter
from rustvllm.exceptions import ConfigError, InvalidRequestError, ModelLoadError
from rustvllm.lora.request import LoRARequest

_RANDOM_BITS = 61
_FIRST_RANDOM = 1 << 32
"""Numbers from here on are random; those below are rows of the configuration."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that an engine has.

    Attributes:
        request: What names it.
        number: What the engine calls it.
    """

    request: LoRARequest
    number: int

    def as_row(self) -> dict[str, Any]:
        """What engines have of it in their list."""
        request = self.request
        return {
            "number": self.number,
            "name": request.lora_name,
            "path": request.lora_path,
            "lora_int_id": request.lora_int_id,
            "base_model_name": request.base_model_name,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """The reverse."""
        request = LoRARequest(row["name"], row["lora_int_id"], row["path"], row["base_model_name"])
        return cls(request, row["number"])


class AdapterRegistry:
    """See the module. Not thread-safe: one thread owns it.

    Args:
        config: Of the engine; None: it serves no adapters.
        names: What the model is called, which no adapter may be.
        download_dir: Where to keep what comes from the hub; None: in its cache.
    """

    def __init__(self, config: LoRAConfig | None, names: Collection[str], download_dir: Path | None = None) -> None:
        self._config, self._names, self._download_dir = config, frozenset(names), download_dir
        self._loaded: dict[str, LoadedAdapter] = {}  # the least recently used first
        for number, module in enumerate(() if config is None else config.modules, 1):
            request = LoRARequest(module.name, number, module.path, module.base_model_name)
            self._loaded[module.name] = LoadedAdapter(request, number)

    def requests(self) -> list[LoRARequest]:
        """What names each adapter that is loaded."""
        return [loaded.request for loaded in self._loaded.values()]

    def find(self, request: object) -> LoadedAdapter | None:
        """The loaded adapter that a request names; None: it is to be loaded.

        Raises:
            InvalidRequestError: No adapters are served, or the request contradicts what is loaded.
        """
        if not isinstance(request, LoRARequest):
            raise InvalidRequestError(
                f"lora_request must be a LoRARequest, got {type(request).__name__}", "lora_request"
            )
        if self._config is None:
            raise InvalidRequestError(
                f"lora_request names {request.lora_name!r}, but adapters need enable_lora=True (--enable-lora)",
                "lora_request",
            )
        if request.lora_name in self._names:
            raise InvalidRequestError(
                f"the adapter {request.lora_name!r} has the same name as the served model; give it another name",
                "lora_request",
            )
        found = self._loaded.get(request.lora_name)
        has_own_number = found is not None and found.request.lora_int_id == request.lora_int_id
        for loaded in () if has_own_number else self._loaded.values():
            other = loaded.request
            if other.lora_int_id == request.lora_int_id and other != request:
                raise InvalidRequestError(
                    f"lora_int_id {request.lora_int_id} of the adapter {request.lora_name!r} already belongs to "
                    f"{other.lora_name!r}; give each adapter its own number",
                    "lora_request",
                )
        if found is None or request.load_inplace:
            return None
        if request.lora_path and not _is_loaded_from(request.lora_path, found.request.lora_path):
            raise InvalidRequestError(
                f"the adapter {request.lora_name!r} is loaded from {found.request.lora_path}, not from "
                f"{request.lora_path}: set load_inplace=True to read another folder, or give it another name",
                "lora_request",
            )
        self._loaded[request.lora_name] = self._loaded.pop(request.lora_name)
        return found

    def check(self, request: LoRARequest) -> str:
        """The folder of an adapter that is to be loaded, absolute; may fetch it from the hub.

        Raises:
            InvalidRequestError: There is none, or a file is missing.
        """
        if not request.lora_path:
            raise InvalidRequestError(
                f"the adapter {request.lora_name!r} is not loaded, and the request has no lora_path", "lora_request"
            )
        try:
            return str(find_adapter(request.lora_name, request.lora_path, self._download_dir))
        except (ConfigError, ModelLoadError) as error:
            raise InvalidRequestError(str(error), "lora_request") from error

    def new_number(self) -> int:
        """A number for an adapter that is to be loaded."""
        return _FIRST_RANDOM + secrets.randbits(_RANDOM_BITS)

    def is_from_start(self, number: int) -> bool:
        """Whether an engine loads the adapter of this number when it is started."""
        return number < _FIRST_RANDOM

    def crowded_out(self, in_use: Collection[int], *, may_crowd_out: bool = True) -> LoadedAdapter | None:
        """The adapter that must go before another is loaded: the least recently used that no request needs.

        Args:
            in_use: Numbers that requests need.
            may_crowd_out: Whether any may.

        Raises:
            InvalidRequestError: As many as may be are in use.
        """
        most = None if self._config is None else self._config.max_cpu_loras
        if most is None or len(self._loaded) < most:
            return None
        if not may_crowd_out:
            raise InvalidRequestError(
                f"{len(self._loaded)} adapters are loaded, and max_cpu_loras is {most}: unload one, or raise it "
                "(--max-cpu-loras)",
                "lora_name",
            )
        for loaded in self._loaded.values():
            if loaded.number not in in_use:
                return loaded
        raise InvalidRequestError(
            f"{len(self._loaded)} adapters are in memory and in use, and max_cpu_loras is {most}: raise it, or ask for "
            "fewer at a time",
            "lora_request",
        )

    def put(self, request: LoRARequest, number: int) -> LoadedAdapter | None:
        """Note an adapter that the engine has loaded; the one that had its name until now."""
        before = self._loaded.pop(request.lora_name, None)
        self._loaded[request.lora_name] = LoadedAdapter(request, number)
        return before

    def take_out(self, lora_int_id: int) -> LoadedAdapter | None:
        """Forget the adapter of a caller's number; None if there is none."""
        for name, loaded in self._loaded.items():
            if loaded.request.lora_int_id == lora_int_id:
                return self._loaded.pop(name)
        return None

    def forget(self, loaded: LoadedAdapter) -> None:
        """Take out an adapter that must go."""
        self._loaded.pop(loaded.request.lora_name, None)

    @property
    def by_name(self) -> Mapping[str, LoadedAdapter]:
        """All of them."""
        return MappingProxyType(self._loaded)

    def loaded(self) -> list[LoadedAdapter]:
        """All of them, the least recently used first."""
        return list(self._loaded.values())

    def named(self, name: str) -> LoadedAdapter | None:
        """The one of a name."""
        return self._loaded.get(name)

    def replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take an engine's list; those that were known keep their order."""
        now = {row["name"]: LoadedAdapter.from_row(row) for row in rows}
        known = {name: now[name] for name in self._loaded if name in now}
        self._loaded = known | now


def _absolute(path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except (OSError, RuntimeError, ValueError):  # too long, or ``~user`` of an unknown user
        return path


def _is_loaded_from(path: str, folder: str) -> bool:
    """Whether a folder is what a path names: on this machine, or on the hub, whichever commit that is."""
    return _absolute(path) == folder or (is_hub_name(path) and is_snapshot_of(Path(folder), path))


def distinct(requests: Iterable[LoRARequest | None]) -> list[LoRARequest]:
    """Each adapter once, in the order of its first request.

    Raises:
        InvalidRequestError: Two have one name and different folders or numbers.
    """
    found: dict[str, LoRARequest] = {}
    for request in requests:
        if request is None:
            continue
        first = found.setdefault(request.lora_name, request)
        if (first.lora_path, first.lora_int_id) != (request.lora_path, request.lora_int_id):
            raise InvalidRequestError(
                f"lora_request names {request.lora_name!r} with two folders or numbers: {first.lora_path!r} "
                f"({first.lora_int_id}) and {request.lora_path!r} ({request.lora_int_id})",
                "lora_request",
            )
    return list(found.values())
