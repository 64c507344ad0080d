""":class:`RequestLog`: what the log says of requests when it is asked to (``--enable-log-requests``).

Texts of clients are theirs: a prompt is logged at level DEBUG only, an output only with ``--enable-log-outputs``.
"""

import dataclasses
import logging
import reprlib
from collections.abc import Sequence

from rustvllm.logger import init_logger
from rustvllm.outputs import RequestOutput
from rustvllm.sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from rustvllm.server.flags.log_args import RequestLogSettings

logger = init_logger(__name__)

_MAX_PARAMS_CHARS = 2000
_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 32
_SHORT.maxstring = _SHORT.maxother = 200


class RequestLog:
    """The lines of one HTTP request.

    Args:
        settings: What to say.
        request_id: As the answer has it.
        params: Of all its prompts.
    """

    def __init__(self, settings: RequestLogSettings, request_id: str, params: SamplingParams | PoolingParams) -> None:
        self._settings = settings
        self._request_id = request_id
        self._params = params
        self._texts: dict[tuple[int, int], list[str]] = {}

    @property
    def wants_outputs(self) -> bool:
        """Whether every new piece of text has to pass :meth:`add`."""
        return self._settings.outputs

    def received(self, prompts: Sequence[object], num_prompt_tokens: Sequence[int]) -> None:
        """All prompts have been taken."""
        logger.info(
            "received request %s: prompts of %s tokens, %s",
            self._request_id,
            ", ".join(map(str, num_prompt_tokens[:16])) + (", …" if len(num_prompt_tokens) > 16 else ""),
            _changed(self._params),
        )
        if logger.isEnabledFor(logging.DEBUG):
            for index, prompt in enumerate(prompts):
                logger.debug("request %s, prompt %d: %s", self._request_id, index, self._shown(prompt))

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """News of one prompt: the lines of those of its samples that have ended."""
        for sample in output.outputs:
            key = (prompt_index, sample.index)
            pieces = self._texts.setdefault(key, [])
            if self._params.output_kind is not RequestOutputKind.DELTA:
                pieces.clear()
            pieces.append(sample.text)
            if sample.finish_reason is not None:
                logger.info(
                    "answer of request %s, prompt %d, sample %d, %s: %s",
                    self._request_id,
                    *key,
                    sample.finish_reason,
                    self._shown("".join(self._texts.pop(key))),
                )

    def _shown(self, value: object) -> str:
        if isinstance(value, dict):
            value = next((value[key] for key in ("prompt", "prompt_token_ids") if value.get(key) is not None), value)
        limit = self._settings.max_len
        if isinstance(value, str | list) and limit is not None and len(value) > limit:
            return f"{value[:limit]!r} and {len(value) - limit} more"
        return repr(value)


def _changed(params: SamplingParams | PoolingParams) -> str:
    """The parameters that are not as their class has them by itself."""
    default = type(params)()
    parts = (
        f"{field.name}={_SHORT.repr(getattr(params, field.name))}"
        for field in dataclasses.fields(params)
        if field.name != "output_kind" and getattr(params, field.name) != getattr(default, field.name)
    )
    name = "PoolingParams" if isinstance(params, PoolingParams) else "SamplingParams"
    return f"{name}({', '.join(parts)})"[:_MAX_PARAMS_CHARS]
