"""``LoRARequest``: which adapter a request is for, under vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass

from rustvllm.config.lora import check_adapter_name
from rustvllm.exceptions import ConfigError, InvalidRequestError
from rustvllm.parameter_checks import entries_for_each, shown


@dataclass(frozen=True, eq=False)
class LoRARequest:
    """An adapter, by name, number and folder; two of one name are equal.

    Attributes:
        lora_name: What it is called.
        lora_int_id: The caller's number for it, at least 1; ``list_loras`` and ``remove_lora`` use it.
        lora_path: Its folder, as peft's ``save_pretrained`` writes it, or its name on the hub (``owner/name``); "" for
            one that is loaded.
        base_model_name: What it was made for; shown, not checked.
        load_inplace: Read the folder again although an adapter of this name is loaded.
        is_3d_lora_weight: Must be False: adapters of fused experts are not served.

    Raises:
        InvalidRequestError: A field has a value that it cannot have.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        try:
            check_adapter_name(self.lora_name)
        except ConfigError as error:
            raise InvalidRequestError(f"lora_name: {error}", "lora_request") from None
        number = self.lora_int_id
        if type(number) is not int or not 1 <= number < 2**62:
            raise InvalidRequestError(f"lora_int_id must be an integer of at least 1, got {number!r}", "lora_request")
        if not isinstance(self.lora_path, str):
            raise InvalidRequestError(f"lora_path must be a string, got {self.lora_path!r:.100}", "lora_request")
        if self.is_3d_lora_weight is not False:
            raise InvalidRequestError(
                f"is_3d_lora_weight must be False, got {shown(self.is_3d_lora_weight)}: it is for adapters of fused "
                "experts, which are not supported yet",
                "lora_request",
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)

    @property
    def adapter_id(self) -> int:
        """``lora_int_id``."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """``lora_name``."""
        return self.lora_name

    @property
    def path(self) -> str:
        """``lora_path``."""
        return self.lora_path


def one_for_each(given: LoRARequest | Sequence[LoRARequest | None], num_prompts: int) -> Sequence[LoRARequest | None]:
    """The adapter of each prompt, out of one for all or a list.

    Raises:
        InvalidRequestError: It is neither, or has another length.
    """
    if isinstance(given, LoRARequest):
        return [given] * num_prompts
    every = entries_for_each("lora_request", given, num_prompts, "a LoRARequest or a list of them")
    if strangers := [each for each in every if not isinstance(each, LoRARequest | None)]:
        raise InvalidRequestError(
            f"lora_request must be a LoRARequest or a list of them, got one of {type(strangers[0]).__name__}",
            "lora_request",
        )
    return every
