"""vLLM's own scheduler behind standard input and output, one JSON object per line; run in an environment that has vLLM.

The first line out is ``{"version": …}``. Each line in is a request with its ``op`` (a method of :class:`Worlds`), each
line out its answer.
"""

import json
import logging
import os
import sys
import tempfile
from collections import deque
from pathlib import Path

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 64,
    "hidden_size": 16,
    "ffn_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 4096,
    "word_embed_proj_dim": 16,
}


class Worlds:
    """One scheduler after the other."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(MODEL))
        self.folder = folder
        init_none_hash(sha256)

    def new(self, numbers: dict) -> dict:
        """A scheduler with these numbers."""
        overlaps = numbers["max_steps_in_flight"] > 1
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(self.folder),
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=numbers["max_model_len"],
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=numbers["max_num_seqs"],
                max_num_batched_tokens=numbers["max_num_batched_tokens"],
                max_model_len=numbers["max_model_len"],
                enable_chunked_prefill=numbers["enable_chunked_prefill"],
                long_prefill_token_threshold=numbers["long_prefill_token_threshold"],
                policy=numbers["scheduling_policy"],
                watermark=numbers["watermark"],
                async_scheduling=overlaps,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(enable_prefix_caching=numbers["enable_prefix_caching"]),
        )
        config.cache_config.num_gpu_blocks = numbers["num_blocks"]
        spec = FullAttentionSpec(block_size=numbers["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = (AsyncScheduler if overlaps else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=numbers["num_blocks"],
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=numbers["block_size"],
            log_stats=False,
        )
        self.hasher = get_request_block_hasher(numbers["block_size"], sha256)
        self.in_flight: deque = deque()
        return {}

    def add(self, request: dict) -> dict:
        """Hand a request in."""
        params = SamplingParams(
            max_tokens=request["max_tokens"], stop_token_ids=request["stop_token_ids"], ignore_eos=True
        )
        new = Request(
            request_id=request["request_id"],
            prompt_token_ids=request["prompt_token_ids"],
            sampling_params=params,
            pooling_params=None,
            priority=request["priority"],
            arrival_time=request["arrival_ns"] * 1e-9,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(new)
        return {}

    def abort(self, request: dict) -> dict:
        """End a request."""
        self.scheduler.finish_requests(request["request_id"], RequestStatus.FINISHED_ABORTED)
        return {}

    def schedule(self, _: dict) -> dict:
        """Plan a step: rows of id, tokens to run and tokens computed before, and whether each gives a token."""
        preempted_before = {id(request): request.num_preemptions for request in self.scheduler.requests.values()}
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        rows = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = requests[request_id]
            computed = request.num_computed_tokens - num_tokens
            rows.append([request_id, num_tokens, computed, not request.is_prefill_chunk])
        if rows:
            self.in_flight.append(output)
        preempted = [
            request.request_id
            for request in requests.values()
            if request.num_preemptions > preempted_before[id(request)]
        ]
        return {
            "rows": rows,
            "preempted": sorted(preempted),
            "running": [request.request_id for request in self.scheduler.running],
            "waiting": [request.request_id for request in self.scheduler.waiting],
        }

    def update(self, request: dict) -> dict:
        """Give the oldest step its tokens, by request id."""
        output = self.in_flight.popleft()
        ids = list(output.num_scheduled_tokens)
        sampled = [[request["tokens"][each]] if each in request["tokens"] else [] for each in ids]
        places = {each: place for place, each in enumerate(ids)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=sampled)
        )
        return {"live": sorted(self.scheduler.requests)}


def main() -> None:
    """Answer line by line until standard input ends."""
    logging.disable(logging.WARNING)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not the answer
    with tempfile.TemporaryDirectory() as folder:
        worlds = Worlds(Path(folder))
        print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            answer = getattr(worlds, request.pop("op"))(request)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
