"""Models shared by ranks: plain processes with gloo and one thread each, and the same steps in this process.

``RankWorld`` starts the processes once; each model is then a job, which every rank loads and runs. Tokens are given, so
that steps differ in nothing but rounding.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from rustvllm import _core
from rustvllm.attention.metadata import AttentionMetadata
from rustvllm.attention.selector import make_attention_backend
from rustvllm.byte_progress import ByteProgress
from rustvllm.config import LoadConfig
from rustvllm.config.architectures import text_config
from rustvllm.config.lora import LoRAConfig, LoRAModule
from rustvllm.config.model_folder import read_model_config
from rustvllm.distributed import rendezvous
from rustvllm.distributed.rank_group import ALONE
from rustvllm.distributed.stages import WHOLE, RankPlace
from rustvllm.layers.cpu.norm import use_core_norms
from rustvllm.layers.cpu.packer import LinearPacker
from rustvllm.layers.linear import Linear
from rustvllm.layers.parallel import shard_of
from rustvllm.lora.store import AdapterStore
from rustvllm.model_loader import load_model
from rustvllm.worker.cpu_decoder import use_core_decoder
from rustvllm.worker.dense_layers import linear_options

PROMPT_LENGTHS = (5, 17, 33)
NUM_DECODES = 5
BLOCK_SIZE = 8
BLOCKS_PER_SEQUENCE = 8
SECONDS = 100
"""A rank that takes longer for a job fails its test."""


def job_of(
    path=None, *, config=None, dtype="float32", cache_dtype=None, quantization=None, decoder="core", adapter=None,
    **environment,
):  # fmt: skip
    """What a rank is asked: a model out of a folder or a file, or a dummy one of a configuration."""
    environment = {"RUSTVLLM_DECODER": decoder, "RUSTVLLM_ACTIVATIONS": "float", **environment}
    return {
        "path": None if path is None else str(path), "config": config, "dtype": dtype, "cache_dtype": cache_dtype,
        "quantization": quantization, "adapter": None if adapter is None else str(adapter), "environment": environment,
    }  # fmt: skip


def load_job(job, group, threads, stage=WHOLE):
    """The model of a job as one rank has it, and how many bytes of weights were read for it."""
    path = None if job["path"] is None else Path(job["path"])
    hf_config = job["config"]
    if hf_config is None and path.suffix == ".gguf":
        hf_config = read_model_config(path, model=str(path)).hf_config
    elif hf_config is None:
        hf_config = json.loads((path / "config.json").read_text())
    hf_config = text_config(hf_config)
    config = SimpleNamespace(
        model=str(path), path=path, hf_config=hf_config, architecture=hf_config["architectures"][0],
        max_model_len=BLOCK_SIZE * BLOCKS_PER_SEQUENCE, seed=0, model_impl="rustvllm", pooler=None,
        config_file=None,
    )  # fmt: skip
    dtype = getattr(torch, job["dtype"])

    def make_packer(outline):
        options = linear_options(job["quantization"], dtype, batch_invariant=False)
        return LinearPacker(threads, options, outline, outline.tied_embedding, 1 << 30)

    load = LoadConfig(load_format="dummy" if path is None else "auto")
    read = []
    advance = ByteProgress.advance
    ByteProgress.advance = lambda self, num_bytes: (read.append(num_bytes), advance(self, num_bytes))
    try:
        model = load_model(config, load, dtype, torch.device("cpu"), 8 << 30, make_packer, group, stage)
    finally:
        ByteProgress.advance = advance
    use_core_norms(model, threads)
    use_core_decoder(model)
    return model, sum(read)


def run_steps(model, dtype, threads, adapters=None, cache_dtype=None):
    """The logits of a prompt step and of decodes after it, float32 ``[1 + NUM_DECODES, requests, vocab_size]``.

    A stage that is not the last gives none.
    """
    cpu = torch.device("cpu")
    backend = make_attention_backend("cpu", model.kv_cache_spec, dtype, cpu, threads, cache_dtype=cache_dtype)
    rng = np.random.default_rng(5)
    tokens = [rng.integers(0, model.vocab_size, length + NUM_DECODES).astype(np.int32) for length in PROMPT_LENGTHS]
    num_blocks = 1 + len(tokens) * BLOCKS_PER_SEQUENCE
    shape = model.kv_cache_spec.layer_shape(num_blocks, BLOCK_SIZE, cache_dtype)
    caches = [torch.zeros(shape, dtype=cache_dtype or dtype) for _ in range(model.kv_cache_spec.num_layers)]
    table = 1 + np.arange(len(tokens) * BLOCKS_PER_SEQUENCE, dtype=np.int32).reshape(len(tokens), BLOCKS_PER_SEQUENCE)
    computed = [0] * len(tokens)
    logits = []
    for step in range(1 + NUM_DECODES):
        news = [length + step for length in PROMPT_LENGTHS]
        spans = [np.arange(begin, end) for begin, end in zip(computed, news, strict=True)]
        slots = [
            row[span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE for row, span in zip(table, spans, strict=True)
        ]
        starts = np.cumsum([0, *map(len, spans)]).astype(np.int32)
        metadata = AttentionMetadata(
            BLOCK_SIZE, torch.from_numpy(table), torch.from_numpy(np.concatenate(slots).astype(np.int32)), starts,
            np.array(news, np.int32),
        )  # fmt: skip
        ids = torch.from_numpy(np.concatenate([row[span] for row, span in zip(tokens, spans, strict=True)]))
        positions = torch.from_numpy(np.concatenate(spans).astype(np.int32))
        if adapters is not None:
            adapters.begin_step(np.array([1, 0, 1]), starts)
        with torch.inference_mode():
            hidden = model(ids, positions, caches, backend.plan(metadata))
            if model.stage.is_last:
                logits.append(model.compute_logits(hidden[torch.from_numpy(starts[1:] - 1).long()]).float().clone())
        computed = news
    return torch.stack(logits) if logits else None


def facts_of(model, bytes_read):
    """What a rank holds and read: bytes of weights in memory, numbers that a token is multiplied with, bytes read."""
    parameters = [p for p in model.parameters() if not p.is_meta]
    resident = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    kernels = {id(m.kernel): m.kernel for m in model.modules() if isinstance(m, Linear)}
    kernels[id(model.head_kernel)] = model.head_kernel
    products = sum(m.weight.numel() for m in model.modules() if isinstance(m, Linear))
    if model.tied_embedding is not None:
        products += model.tied_embedding.numel()
    replicated = sum(
        parameter.numel()
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if shard_of(module, name) is None
    )
    kernel = model.decoder_kernel
    return {
        "resident": sum(resident.values()) + sum(kernel.nbytes for kernel in kernels.values() if kernel is not None),
        "products": products,
        "read": bytes_read,
        "replicated": replicated,
        "kv_heads": model.kv_cache_spec.num_kv_heads,
        "layers": model.kv_cache_spec.num_layers,
        "tables": sum(
            p.numel() for name, p in model.named_parameters() if name.startswith(("embed", "wpe", "lm_head"))
        ),
        "is_one_call": kernel is not None,
        "spans": getattr(kernel, "num_shared_halves", 0),
        "collectives": model.group.time.calls,
        "seconds": model.group.time.seconds,
    }


def run_job(job, group=ALONE, threads=None, stage=WHOLE):
    """Load and run a model: its logits, and what this rank holds."""
    threads = threads or _core.CpuThreads(1)
    before = {name: os.environ.get(name) for name in job["environment"]}
    os.environ.update(job["environment"])
    try:
        model, bytes_read = load_job(job, group, threads, stage)
        dtype, adapters = getattr(torch, job["dtype"]), None
        if job["adapter"] is not None:
            lora = LoRAConfig(modules=(LoRAModule(name="one", path=job["adapter"]),))
            adapters = AdapterStore(model, lora, dtype, threads, batch_invariant=False)
        cache_dtype = dtype if job["cache_dtype"] is None else getattr(torch, job["cache_dtype"])
        logits = run_steps(model, dtype, threads, adapters, cache_dtype)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    return logits, facts_of(model, bytes_read)


class RankWorld:
    """Processes that share models. A context manager: its end ends them.

    Args:
        size: How many.
        in_rank_order: See ``RankGroup``.
        meets: Whether tensors go through memory that the processes share, else by gloo.
        num_stages: Groups of layers; the processes are divided among them.
    """

    def __init__(self, size, folder, *, in_rank_order=False, meets=True, num_stages=1):
        self.size, self._folder, self._count = size, Path(folder), 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        repository = Path(__file__).resolve().parent.parent
        path = os.pathsep.join([str(repository / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        tensor_size = size // num_stages
        # Their first ranks only make the memory; see ``main``.
        meetings = [_core.RankMeeting(tensor_size) for _ in range(num_stages if meets and tensor_size > 1 else 0)]
        fds = tuple(meeting.fileno() for meeting in meetings)
        order = {
            "tensor_size": tensor_size, "num_stages": num_stages, "port": port, "in_rank_order": in_rank_order,
            "meeting_fds": fds,
        }  # fmt: skip
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, json.dumps(order | {"rank": rank})], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds,
            )
            for rank in range(size)
        ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()

    def run(self, job):
        """The first rank's logits, and each rank's facts; raises what a rank raised, by its text."""
        self._count += 1
        out = self._folder / f"logits-{self._count}.npy"
        line = json.dumps(job | {"out": str(out)}) + "\n"
        for rank in self._ranks:
            rank.stdin.write(line)
            rank.stdin.flush()
        late = threading.Timer(SECONDS, lambda: [rank.kill() for rank in self._ranks])
        late.start()
        try:
            answers = [json.loads(rank.stdout.readline() or '{"error": "the rank died"}') for rank in self._ranks]
        finally:
            late.cancel()
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise RuntimeError(f"{len(errors)} of {self.size} ranks: {errors[0]}")
        return torch.from_numpy(np.load(out)), answers


def main():
    order = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints does not answer
    torch.set_num_threads(1)
    place = RankPlace(order["rank"], order["tensor_size"], order["num_stages"])
    size = place.tensor_size * place.num_stages
    store = torch.distributed.TCPStore("127.0.0.1", order["port"], size, is_master=order["rank"] == 0)
    fds, meeting = order["meeting_fds"], None
    if fds:
        meeting = _core.RankMeeting.join(fds[place.stage], place.tensor_rank)
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        try:
            own_store = torch.distributed.PrefixStore(f"job {number}", store)
            group, stage = rendezvous.join(
                own_store, place, torch.device("cpu"), SECONDS, in_rank_order=order["in_rank_order"], meeting=meeting
            )
            logits, facts = run_job(job, group, stage=stage)
            if order["rank"] == 0:
                np.save(job["out"], logits.numpy())
        except Exception as error:  # noqa: BLE001 -- the test says which it wanted
            facts = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(facts) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
