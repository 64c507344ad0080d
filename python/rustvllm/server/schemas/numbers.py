"""Numbers of request bodies: JSON's ``true`` and ``false`` are none; texts that are numbers are, as for vLLM."""

from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema


class _NoBoolean:
    """Refuses what pydantic takes for 1 and 0, without a call of Python's: there are lists of a million numbers."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        number = handler(source)
        may_be: list[core_schema.CoreSchema | tuple[core_schema.CoreSchema, str]] = [
            core_schema.int_schema(strict=True),
            core_schema.float_schema(strict=True),
            core_schema.str_schema(strict=True),
        ]
        either = core_schema.union_schema(may_be, custom_error_type=f"{number['type']}_type")
        return core_schema.chain_schema([either, number])

    def __get_pydantic_json_schema__(
        self,
        schema: core_schema.CoreSchema,
        handler: GetJsonSchemaHandler,
    ) -> dict[str, Any]:
        return {"type": self._kind}


Int = Annotated[int, _NoBoolean("integer")]
"""A whole number: 3, 3.0 or "3"."""
Float = Annotated[float, _NoBoolean("number")]
"""A number: 0.5, 1 or "0.5"."""
