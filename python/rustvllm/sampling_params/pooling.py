"""What a caller may ask of one embedding or classification: :class:`PoolingParams`."""

from dataclasses import dataclass
from typing import Any, Final, Self

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import check_bool, check_int, shown
from rustvllm.sampling_params.params import MAX_TOKENS_LIMIT, RequestOutputKind

_TASKS: Final = (None, "embed", "classify")
_OTHER_TASKS: Final = "embed and classify are the only pooling tasks that are built"
_SIDES: Final = (None, "left", "right")


@dataclass(kw_only=True)
class PoolingParams:
    """Parameters of one embedding or classification, with vLLM's names.

    Attributes:
        use_activation: Whether an embedding is normalised to length 1, or the numbers of labels become probabilities;
            None: as the model's configuration says.
        dimensions: Keep so many of an embedding's numbers, before it is normalised; only for models that were trained
            for it (Matryoshka). None: as the model's configuration says.
        task: ``embed``, ``classify`` or None: what the engine does.
        skip_reading_prefix_cache: Compute the whole prompt, whatever of it is cached.
        truncate_prompt_tokens: Keep so many tokens of the prompt; -1: as many as the model can hold.
        truncation_side: Which end of the prompt is cut off, ``left`` or ``right`` (default).
        step_tag_id, returned_token_ids, late_interaction_params, extra_kwargs: Must be None; vLLM's, of tasks that are
            not built.
        requires_token_ids: No effect: tokens are known here.
        output_kind: Must be ``FINAL_ONLY``: a request gives one vector.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    task: str | None = None
    skip_reading_prefix_cache: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    requires_token_ids: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check what needs no model; parameters may have been changed since they were made.

        Raises:
            InvalidRequestError: Names the parameter, its value and what works.
        """
        if self.task not in _TASKS:
            raise InvalidRequestError(
                f"task must be embed, classify or None, got {shown(self.task)}: {_OTHER_TASKS}", "task"
            )
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if (value := getattr(self, name)) is not None:
                check_bool(name, value)
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1)
        if self.truncate_prompt_tokens is not None:
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_TOKENS_LIMIT)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens is 0, which leaves no token of the prompt: at least 1 is needed",
                "truncate_prompt_tokens",
            )
        if self.truncation_side not in _SIDES:
            raise InvalidRequestError(
                f"truncation_side must be left or right, got {shown(self.truncation_side)}", "truncation_side"
            )
        for name in ("step_tag_id", "returned_token_ids", "late_interaction_params", "extra_kwargs"):
            if getattr(self, name) is not None:
                raise InvalidRequestError(f"{name} is not supported yet: {_OTHER_TASKS}", name)
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise InvalidRequestError(
                f"output_kind must be FINAL_ONLY, got {shown(self.output_kind)}: a request gives one vector",
                "output_kind",
            )

    def clone(self) -> Self:
        """A copy of its own."""
        return type(self)(**vars(self))
