"""The configuration of an engine, the flags that set it, and the model folder and machine it is read from."""

from rustvllm.config.attention_backends import ATTENTION_BACKENDS as ATTENTION_BACKENDS
from rustvllm.config.cache import (
    KV_CACHE_DTYPES as KV_CACHE_DTYPES,
)
from rustvllm.config.cache import (
    MAX_SWAP_SPACE as MAX_SWAP_SPACE,
)
from rustvllm.config.cache import (
    PREFIX_CACHING_HASH_ALGOS as PREFIX_CACHING_HASH_ALGOS,
)
from rustvllm.config.cache import (
    CacheConfig as CacheConfig,
)
from rustvllm.config.cache import (
    HashAlgorithm as HashAlgorithm,
)
from rustvllm.config.engine_config import (
    CAPTURE_MODES as CAPTURE_MODES,
)
from rustvllm.config.engine_config import (
    DEVICES as DEVICES,
)
from rustvllm.config.engine_config import (
    EXECUTORS as EXECUTORS,
)
from rustvllm.config.engine_config import (
    LOAD_FORMATS as LOAD_FORMATS,
)
from rustvllm.config.engine_config import (
    MAX_SIM_MS as MAX_SIM_MS,
)
from rustvllm.config.engine_config import (
    METRICS_PREFIX as METRICS_PREFIX,
)
from rustvllm.config.engine_config import (
    QUANTIZATIONS as QUANTIZATIONS,
)
from rustvllm.config.engine_config import (
    STORED_QUANTIZATIONS as STORED_QUANTIZATIONS,
)
from rustvllm.config.engine_config import (
    CUDAGraphConfig as CUDAGraphConfig,
)
from rustvllm.config.engine_config import (
    DeviceConfig as DeviceConfig,
)
from rustvllm.config.engine_config import (
    EngineConfig as EngineConfig,
)
from rustvllm.config.engine_config import (
    LoadConfig as LoadConfig,
)
from rustvllm.config.engine_config import (
    SimConfig as SimConfig,
)
from rustvllm.config.engine_config import (
    UsageContext as UsageContext,
)
from rustvllm.config.lora import (
    LoRAConfig as LoRAConfig,
)
from rustvllm.config.model import (
    DTYPES as DTYPES,
)
from rustvllm.config.model import (
    LARGEST_MAX_LOGPROBS as LARGEST_MAX_LOGPROBS,
)
from rustvllm.config.model import (
    LOGPROBS_MODES as LOGPROBS_MODES,
)
from rustvllm.config.model import (
    MODEL_IMPLS as MODEL_IMPLS,
)
from rustvllm.config.model import (
    ModelConfig as ModelConfig,
)
from rustvllm.config.parallel import (
    MAX_DATA_PARALLEL_SIZE as MAX_DATA_PARALLEL_SIZE,
)
from rustvllm.config.parallel import (
    ParallelConfig as ParallelConfig,
)
from rustvllm.config.ranges import (
    require_choice as require_choice,
)
from rustvllm.config.ranges import (
    require_fraction as require_fraction,
)
from rustvllm.config.ranges import (
    require_int as require_int,
)
from rustvllm.config.ranges import (
    require_number as require_number,
)
from rustvllm.config.scheduler import (
    PREEMPTION_MODES as PREEMPTION_MODES,
)
from rustvllm.config.scheduler import (
    SCHEDULING_POLICIES as SCHEDULING_POLICIES,
)
from rustvllm.config.scheduler import (
    PreemptionMode as PreemptionMode,
)
from rustvllm.config.scheduler import (
    SchedulerConfig as SchedulerConfig,
)
from rustvllm.config.speculation import (
    SpeculationConfig as SpeculationConfig,
)
from rustvllm.config.tracing import (
    TracingConfig as TracingConfig,
)
