"""What a caller may ask of one request: the parameters, their table, their checks, and what output they demand.

``SamplingParams`` and its relatives are imported from here, as from vLLM's module of this name.
"""

from rustvllm.sampling_params.params import (
    GREEDY_BELOW,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS_LIMIT,
    BeamSearchParams,
    PromptOnlyParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
)
from rustvllm.sampling_params.pooling import PoolingParams
from rustvllm.sampling_params.repetition_detection import RepetitionDetectionParams
from rustvllm.sampling_params.structured_outputs import StructuredOutputsParams

__all__ = [
    "GREEDY_BELOW",
    "MAX_STOP_STRINGS",
    "MAX_STOP_TOKEN_IDS",
    "MAX_TOKENS_LIMIT",
    "BeamSearchParams",
    "PoolingParams",
    "PromptOnlyParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]
