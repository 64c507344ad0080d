"""The worker of one device: chooses the device, loads the model, makes the KV cache and owns the runner."""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.attention.selector import make_attention_backend
from rustvllm.attention.static_batch import StaticAttentionBackend
from rustvllm.config.devices import why_no_cuda
from rustvllm.distributed.rank_group import ALONE, RankGroup
from rustvllm.distributed.stages import WHOLE, Stage
from rustvllm.exceptions import ConfigError, DeviceMemoryError, ModelLoadError
from rustvllm.layers.cpu.norm import use_core_norms
from rustvllm.layers.fused import runs_fused_on
from rustvllm.layers.parallel import number_layers
from rustvllm.logger import init_logger
from rustvllm.lora.merging import changes_by
from rustvllm.lora.store import AdapterStore
from rustvllm.model_loader import load_model
from rustvllm.model_loader.score_layer import fill_score
from rustvllm.model_loader.vision_tower import load_vision_tower
from rustvllm.models.classifier import Classifier
from rustvllm.sample.cpu_draw import CpuDraw
from rustvllm.sample.logits_processors import load_logits_processors
from rustvllm.sample.sampler import Sampler
from rustvllm.sample.scorer import Scorer
from rustvllm.worker import host_resources
from rustvllm.worker.block_copier import BlockCopier, zeros_on_host
from rustvllm.worker.cpu_decoder import use_core_decoder
from rustvllm.worker.dense_layers import make_batch_invariant, make_device_packer, make_linear_packer
from rustvllm.worker.drafts.model import load_draft_model
from rustvllm.worker.graphs.context import GraphContext
from rustvllm.worker.graphs.decode_graphs import default_capture_sizes
from rustvllm.worker.graphs.draft_graphs import draft_sizes
from rustvllm.worker.graphs.mixed_graphs import MAX_SAMPLED
from rustvllm.worker.graphs.recorder import CannotCaptureError, make_graph_recorder
from rustvllm.worker.graphs.sampling import make_sampling
from rustvllm.worker.graphs.step_graphs import StepGraphs
from rustvllm.worker.input_batch import FollowerBatch, InputBatch
from rustvllm.worker.memory.allocator import keep_freed_memory
from rustvllm.worker.memory.kv_cache import KVCacheMemory, available_memory
from rustvllm.worker.memory.profile_run import profile_run
from rustvllm.worker.model_runner import GPUModelRunner
from rustvllm.worker.pooler import Pooler
from rustvllm.worker.prompt_images import PromptImages
from rustvllm.worker.step_buffers import BufferSpec, StepBuffers, send_array
from rustvllm.worker.streams import make_streams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from rustvllm.config import EngineConfig
    from rustvllm.layers.cpu.packer import LinearPacker
    from rustvllm.models.interface import CausalLM

logger = init_logger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CACHE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "int8_per_token_head": torch.int8,
    "fp8": torch.uint8,
    "fp8_e4m3": torch.uint8,
}
"""The torch dtype of a KV cache, by ``kv_cache_dtype``."""
SINGLE_THREAD_BYTES = 32 << 20
"""A model with fewer bytes of parameters runs in one thread: its products are so short that threads lose more time
waiting for each other than they save, and on a busy machine thirty times as much. ``cpu_threads`` and
``OMP_NUM_THREADS`` override this."""


class Worker:
    """See the module.

    Args:
        config: The engine's configuration.
        float_columns: Names of the columns of ``sampling_float``.
        int_columns: Names of the columns of ``sampling_int``.
        group: The ranks that share layers with this one; only the first rank of the last stage samples.
        stage: Which layers these ranks have.

    Attributes:
        group: As given.
        stage: As given.
        device: Where everything lies.
        dtype: The dtype of weights, and of the KV cache unless that has another.
        runner: Set once the model is loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        float_columns: Sequence[str],
        int_columns: Sequence[str],
        group: RankGroup = ALONE,
        stage: Stage = WHOLE,
    ) -> None:
        self.config = config
        self.group, self.stage = group, stage
        self._float_columns = tuple(float_columns)
        self._int_columns = tuple(int_columns)
        self.device = resolve_device(config.device.device, group.rank % config.parallel.ranks_per_node)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the calling program may have made another device current
        self.dtype = resolve_dtype(config.model.dtype, self.device, config.model.hf_config)
        self.runner: GPUModelRunner | None = None
        self._has_no_graphs = False  # set when a capture shows that the model cannot run in a graph
        self._threads: _core.CpuThreads | None = None  # threads of the core's kernels, on the CPU

    @property
    def num_bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers, including those of a draft model."""
        runner = self._loaded()
        models = [runner.model, *([] if runner.draft_model is None else [runner.draft_model.model])]
        block_size, dtype = self.config.cache.block_size, self.cache_dtype
        return sum(model.kv_cache_spec.bytes_per_block(block_size, dtype) for model in models)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the KV cache: the model's, or the one configured; uint8 where attention reads bytes as e4m3."""
        name = self.config.cache.kv_cache_dtype
        return self.dtype if name == "auto" else CACHE_DTYPES[name]

    def load_model(self) -> None:
        """Load the weights.

        Raises:
            ModelLoadError: See ``model_loader.load_model``.
        """
        model = self._load_target()
        adapters, input_batch = self._make_adapters(model), self._make_batch(model.vocab_size)
        backend = make_attention_backend(
            self.config.device.attention_backend,
            model.kv_cache_spec,
            self.dtype,
            self.device,
            self._threads or torch.get_num_threads(),
            batch_invariant=self.config.device.batch_invariant,
            cache_dtype=self.cache_dtype,
        )
        logger.info("attention by %s", backend.name)
        if self.config.device.batch_invariant and self.device.type != "cpu":
            make_batch_invariant(model)
        self.runner = GPUModelRunner(
            model,
            backend,
            input_batch,
            device=self.device,
            block_size=self.config.cache.block_size,
            async_scheduling=self.config.scheduler.async_scheduling,
            streams=make_streams(self.device),
            adapters=adapters,
            # With stages no step has a −1, because a request is in only one stage at a time.
            share_ids=self.group.broadcast
            if self.config.scheduler.async_scheduling and self.group.size > 1 and self.stage.count == 1
            else None,
        )
        if (pooler := self.config.model.pooler) is not None:
            score = fill_score(model, self.config) if isinstance(model, Classifier) else None
            self.runner.pooler = Pooler(pooler.seq_pooling_type, self.config.scheduler.max_num_seqs, score)
        if (vision := self.config.model.vision) is not None:
            free = available_memory(self.device)
            tower = load_vision_tower(self.config.model, vision, self.config.load, self.dtype, free)
            column, num_rows = self._int_columns.index("num_multimodal"), self.config.scheduler.max_num_seqs
            self.runner.images = PromptImages(tower, vision, column, num_rows)
        cpu_draw = None if self._threads is None else CpuDraw(self._threads)
        self.runner.sampler = Sampler(cpu_draw)
        self.runner.scorer = Scorer(self.config.model.logprobs_mode, cpu_draw)
        if self.config.draft_model is not None:
            assert self._threads is not None  # draft models run only on the CPU
            self.runner.draft_model = load_draft_model(
                self.config,
                self.config.draft_model,
                self.dtype,
                self.cache_dtype,
                available_memory(self.device),
                self._threads,
            )

    def _load_target(self) -> CausalLM:
        """Load the model that requests name; on the CPU, put the core's kernels in place."""
        on_cpu = self.device.type == "cpu"
        on_device = partial(make_device_packer, device=self.device)
        model = load_model(
            self.config.model,
            self.config.load,
            self.dtype,
            self.device,
            available_memory(self.device),
            self._make_packer if on_cpu else on_device if runs_fused_on(self.device) else None,
            self.group,
            self.stage,
            partial(changes_by, merged) if (merged := self.config.load.merge_lora) else None,
        )
        number_layers(model)
        if self._threads is not None:
            use_core_norms(model, self._threads)
            use_core_decoder(model)
        return model

    def _make_adapters(self, model: CausalLM) -> AdapterStore | None:
        """Room for the adapters of a model; None if adapters are not enabled."""
        if self.config.lora is None:
            return None
        invariant = self.config.device.batch_invariant
        send = partial(send_array, device=self.device)
        return AdapterStore(model, self.config.lora, self.dtype, self._threads, batch_invariant=invariant, send=send)

    def _make_batch(self, vocab_size: int) -> InputBatch:
        """The persistent batch; a rank that does not sample has one without what only sampling needs."""
        make_batch = InputBatch if self.group.rank == 0 and self.stage.is_last else FollowerBatch
        input_batch = make_batch(
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_blocks_per_seq=-(-self.config.model.max_model_len // self.config.cache.block_size),
            vocab_size=vocab_size,
            device=self.device,
            float_columns=self._float_columns,
            int_columns=self._int_columns,
        )
        names = self.config.model.logits_processors
        input_batch.extras.load(load_logits_processors(names, self.config, self.device))
        return input_batch

    def determine_num_blocks(self) -> int:
        """The number of KV blocks, including the null block; see :meth:`KVCacheMemory.num_blocks`."""
        return self._cache_memory().num_blocks(self._cuda_budget)

    def determine_num_cpu_blocks(self, num_blocks: int) -> int:
        """The number of blocks in CPU memory for preempted requests; see :meth:`KVCacheMemory.num_cpu_blocks`."""
        return self._cache_memory().num_cpu_blocks(num_blocks)

    def initialize_kv_cache(
        self, num_blocks: int, buffer_spec: BufferSpec, num_sets: int, num_cpu_blocks: int = 0
    ) -> list[dict[str, np.ndarray[Any, Any]]]:
        """Allocate the KV cache, its CPU tier and the step-buffer sets.

        Returns:
            The sets as numpy arrays, for ``_core.Scheduler``.
        """
        if self.device.type == "cpu":
            keep_freed_memory()
        runner = self._loaded()
        block_size, dtype = self.config.cache.block_size, self.cache_dtype
        shape = runner.model.kv_cache_spec.layer_shape(num_blocks, block_size, dtype)
        with self._explained_start(f"a KV cache of {num_blocks} blocks"):
            runner.kv_caches = [self._zeros(shape) for _ in range(runner.model.kv_cache_spec.num_layers)]
        caches = runner.kv_caches
        if (draft_model := runner.draft_model) is not None:
            spec = draft_model.model.kv_cache_spec
            shape = spec.layer_shape(num_blocks, block_size, dtype)
            draft_model.kv_caches = [self._zeros(shape) for _ in range(spec.num_layers)]
            caches = [*caches, *draft_model.kv_caches]
        runner.block_copier = BlockCopier(caches, num_cpu_blocks, streams=runner.streams)
        with self._explained_start("what steps and graphs read and leave"):
            runner.graphs = self._make_graphs(runner.kv_caches, num_sets)
            runner.step_buffers = [
                StepBuffers(buffer_spec, device=self.device, streams=runner.streams) for _ in range(num_sets)
            ]
        logger.info(
            "KV cache: %d blocks of %d tokens, %.1f MiB on %s",
            num_blocks,
            self.config.cache.block_size,
            num_blocks * self.num_bytes_per_block / 2**20,
            self.device,
        )
        if num_cpu_blocks:
            swap_bytes = num_cpu_blocks * self.num_bytes_per_block
            logger.info("swap space: %d blocks, %.1f MiB of CPU memory", num_cpu_blocks, swap_bytes / 2**20)
        return [step.arrays for step in runner.step_buffers]

    @property
    def adapters(self) -> AdapterStore:
        """The adapters of the model.

        Raises:
            ConfigError: Adapters are not enabled.
        """
        if (adapters := self._loaded().adapters) is None:
            raise ConfigError("adapters need enable_lora")
        return adapters

    @property
    def adapters_digest(self) -> int:
        """By which ranks find out that they have read the same adapters; 0 if there are none or one rank has all."""
        adapters = self._loaded().adapters
        if adapters is None or not adapters.digests:
            return 0
        digest = hashlib.blake2b(digest_size=8)  # also of which adapter has which number
        for row in sorted(adapters.digests.items()):
            digest.update(struct.pack("<QQ", *row))
        return int.from_bytes(digest.digest()) & ~1

    def warm_up(self) -> None:
        """Run a small step of every kind, so that no request waits for libraries to initialize, and capture graphs.

        See ``capture_graphs``.

        Raises:
            ModelLoadError: A CUDA graph cannot be captured.
        """
        runner = self._loaded()
        profile_run(runner, [1, 1, 3], self.cache_dtype)
        if runner.adapters is not None:
            with torch.inference_mode(), runner.computing():
                runner.adapters.warm_up()
        self.capture_graphs()

    def capture_graphs(self) -> None:
        """Capture the CUDA graphs of steps, if graphs are enabled and not captured lazily.

        A model that cannot run in a graph runs without, unless the configuration lists capture sizes.

        Raises:
            ModelLoadError: There is no memory for them, or a graph that the configuration lists cannot be captured.
        """
        runner = self._loaded()
        if runner.graphs is None:
            return
        if self.config.cuda_graphs.capture_mode == "lazy":
            logger.info("CUDA graphs: each is captured when it is first needed")
            return
        began = time.monotonic()
        every = max(1, runner.graphs.num_ahead() // 4)

        def show(done: int, total: int) -> None:
            if done % every == 0 or done == total:
                logger.info("CUDA graphs: %d of %d captured, %.1f s", done, total, time.monotonic() - began)

        with self._explained_capture(runner.graphs), runner.computing():
            runner.graphs.capture_all(show)
        if self._has_no_graphs:
            runner.graphs = None

    @contextmanager
    def _explained_start(self, what: str) -> Iterator[None]:
        """Turn a device's out-of-memory error during the start into one that says what to lower."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(str(self.out_of_memory(error, what))) from error

    def out_of_memory(self, error: torch.OutOfMemoryError, what: str) -> DeviceMemoryError:
        """The error that says what to lower, in place of torch's; also returns torch's unused memory to the device.

        Args:
            error: The error from torch.
            what: What needed the memory.
        """
        torch.cuda.empty_cache()
        scheduler, cache = self.config.scheduler, self.config.cache
        return DeviceMemoryError(
            f"{self.device} is out of memory in {what} ({str(error).splitlines()[0]}); lower gpu_memory_utilization "
            f"({cache.gpu_memory_utilization:g}) or kv_cache_memory_bytes, max_num_batched_tokens "
            f"({scheduler.max_num_batched_tokens}) or max_num_seqs ({scheduler.max_num_seqs})"
        )

    def shutdown(self) -> None:
        """Free the model and the cache."""
        self.runner = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _loaded(self) -> GPUModelRunner:
        if self.runner is None:
            raise RuntimeError("load_model must be called first")
        return self.runner

    def _make_packer(self, outline: CausalLM) -> LinearPacker:
        self._set_num_threads(outline)
        self._threads = _core.CpuThreads(torch.get_num_threads())
        if self.config.device.batch_invariant:
            # torch only computes elementwise operations; split among threads, their vector loops would end elsewhere.
            torch.set_num_threads(1)
        return make_linear_packer(self.config, outline, self.dtype, self._threads)

    def _make_graphs(self, kv_caches: Sequence[Tensor], num_sets: int) -> StepGraphs | None:
        """The graphs over a KV cache, not captured yet; None if no step runs in a graph."""
        runner, sizes = self._loaded(), self.config.cuda_graphs.capture_sizes
        recorder = make_graph_recorder(self.device)
        if recorder is None or sizes == () or self._has_no_graphs or runner.pooler is not None:
            return None
        if not isinstance(runner.backend, StaticAttentionBackend):
            logger.info("CUDA graphs: none, because attention by %s cannot be captured", runner.backend.name)
            return None
        scheduler = self.config.scheduler
        sizes = default_capture_sizes(scheduler.max_num_seqs) if sizes is None else sizes
        speculation = self.config.speculation
        most = 0 if speculation is None else speculation.num_speculative_tokens
        of_drafts = draft_sizes(scheduler.max_num_seqs, most)
        largest = max([*sizes, min(MAX_SAMPLED, scheduler.max_num_seqs), *(size.num_tokens for size in of_drafts)])
        return StepGraphs(
            sizes,
            min(self.config.cuda_graphs.max_mixed_tokens, scheduler.max_num_batched_tokens),
            GraphContext(
                recorder=recorder,
                model=runner.model,
                backend=runner.backend,
                kv_caches=kv_caches,
                block_table=runner.input_batch.block_table,
                last_token_ids=runner.last_token_ids,
                block_size=self.config.cache.block_size,
                make_adapters=None if runner.adapters is None else runner.adapters.make_static,
                sampling=make_sampling(
                    runner.model, runner.input_batch.draws, self.dtype, self.device, largest, num_sets
                ),
            ),
            of_drafts,
        )

    @contextmanager
    def _explained_capture(self, graphs: StepGraphs) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(
                f"there is not enough memory for CUDA graphs of up to {graphs.decodes.sizes[-1]} requests ({error}); "
                "lower gpu_memory_utilization, kv_cache_memory_bytes or cudagraph_mixed_tokens, list fewer "
                "cudagraph_capture_sizes, or set enforce_eager"
            ) from error
        except CannotCaptureError as error:
            if self.config.cuda_graphs.capture_sizes is not None:
                raise ModelLoadError(f"the model cannot run in a CUDA graph ({error}); set enforce_eager") from error
            logger.warning("CUDA graphs: none, because the model cannot run in one (%s)", error)
            self._has_no_graphs = True
        except RuntimeError as error:  # the device may no longer work correctly
            raise ModelLoadError(
                f"a CUDA graph could not be captured ({str(error).splitlines()[0]}); set enforce_eager"
            ) from error

    def _set_num_threads(self, model: CausalLM) -> None:
        num_threads = self.config.device.cpu_threads
        if self.device.type != "cpu" or (num_threads is None and "OMP_NUM_THREADS" in os.environ):
            return
        if num_threads is None:
            size = sum(parameter.nbytes for parameter in model.parameters())
            # torch counts logical cores and ignores quotas; more threads than cores make every product slower.
            own_cores = max(1, host_resources.num_compute_threads() // self.config.parallel.num_sharers)
            num_threads = 1 if size < SINGLE_THREAD_BYTES else own_cores
        torch.set_num_threads(num_threads)
        logger.info("torch computes with %d thread%s", num_threads, "" if num_threads == 1 else "s")

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.cache_dtype, device=self.device)
        return zeros_on_host(shape, self.cache_dtype)

    def _cache_memory(self) -> KVCacheMemory:
        return KVCacheMemory(self.config, self.device, self.dtype.itemsize, self.num_bytes_per_block)

    def _cuda_budget(self) -> int:
        """The memory that ``gpu_memory_utilization`` leaves after the weights and the largest step.

        Raises:
            ModelLoadError: There is no memory for that step.
        """
        with self._explained_start("the largest step, which is run to see what it takes"):
            return self._measured_cuda_budget()

    def _measured_cuda_budget(self) -> int:
        runner = self._loaded()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        profile_run(runner, self._largest_batch(), self.cache_dtype)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        graphs = self._graph_bytes()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        elsewhere = total - free - torch.cuda.memory_reserved(self.device)  # contexts, libraries, other processes
        share = self.config.cache.gpu_memory_utilization
        penalties = runner.input_batch.penalty_bytes
        adapters = 0 if runner.adapters is None else runner.adapters.bytes_to_come()
        budget = int(total * share) - peak - elsewhere - graphs - penalties - adapters
        logger.info(
            "%.2f GiB for the KV cache: %.2f x %.2f GiB less %.2f for weights and the largest step, %.2f for CUDA "
            "graphs, %.2f for penalties, %.2f for adapters to come and %.2f that others hold",
            *(budget / 2**30, share, total / 2**30, peak / 2**30, graphs / 2**30, penalties / 2**30),
            *(adapters / 2**30, elsewhere / 2**30),
        )
        return budget

    def _graph_bytes(self) -> int:
        """The memory that CUDA graphs will take: captures some of them over a small cache, the largest first."""
        runner = self._loaded()
        spec, block_size = runner.model.kv_cache_spec, self.config.cache.block_size
        cache = self._zeros(spec.layer_shape(2, block_size, self.cache_dtype))
        graphs = self._make_graphs([cache] * spec.num_layers, num_sets=1)
        if graphs is None:
            return 0
        torch.cuda.empty_cache()  # as a capture does; else memory that the run before left would count as freed
        num_bytes = 0
        with self._explained_capture(graphs), runner.computing():
            num_bytes = graphs.measure(self.device)
        return 0 if self._has_no_graphs else num_bytes

    def _largest_batch(self) -> list[int]:
        """Prompt lengths of a step with the most tokens and the most requests."""
        scheduler, longest = self.config.scheduler, self.config.model.max_model_len
        num_seqs, budget = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        base, extra = divmod(budget, num_seqs)
        return [min(longest, base + (i < extra)) for i in range(num_seqs)]


def resolve_dtype(dtype: str, device: torch.device, hf_config: Mapping[str, Any]) -> torch.dtype:
    """The torch dtype for a configured name.

    ``auto`` is float32 on the CPU; on CUDA it is the checkpoint's dtype if that has 16 bits, else float16.
    """
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    stored = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return torch.bfloat16 if stored == "bfloat16" else torch.float16


def resolve_device(name: str, rank: int = 0) -> torch.device:
    """The device of a rank: on CUDA each rank has its own, out of those that this process may use.

    Raises:
        ModelLoadError: There is no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(
            f"device is 'cuda', but torch {torch.__version__} finds no CUDA device: {why_no_cuda()}. To run on the CPU "
            "instead, use --device cpu (in Python, device='cpu')"
        )
    return torch.device(name, rank) if name == "cuda" else torch.device(name)
