"""Measures the cost of sharing a model on the CPU: N ranks of one thread, compared with one process of N threads.

    python benches/python/tensor_parallel.py [--ranks 2] [--dtype float32|bfloat16] [--quantization int8]
        [--collectives shared gloo] [--rows 1 8 32] [--prefill 512] [--num-steps 20] [--turns 3] [--output-json FILE]

The model has random weights in the shape of a Llama of 160 million. All processes exist from the beginning and
alternate, a fixed number of steps each; the others wait for a line. Figures are milliseconds of a step: forward pass,
logits and argmax. "quick" is the lower quartile, which other work on the machine disturbs less, and the ratio of the
two is that of the quick steps. "share in collectives" is the share of each rank's time, including waits for a late
rank.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from bench_report import new_report, publish

LLAMA_160M = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 4096,
    "vocab_size": 32000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
CONTEXT = 128
"""Number of tokens before those that are decoded."""
BLOCK_SIZE = 16
NUM_WARMUPS = 3


class Ranks:
    """Processes that share a model; each computes with a number of threads.

    Args:
        size: The number of processes.
        threads: The threads of each.
        options: The command line's options.
        collectives: How they exchange tensors, ``shared`` or ``gloo``.
    """

    def __init__(self, size: int, threads: int, options: argparse.Namespace, collectives: str = "shared") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        order = {
            "size": size, "threads": threads, "port": port, "dtype": options.dtype,
            "quantization": options.quantization, "pins": not options.no_pins,
        }  # fmt: skip
        self._meeting = None
        if size > 1 and collectives == "shared":
            from rustvllm import _core

            self._meeting = _core.RankMeeting(size)
        fds = [] if self._meeting is None else [self._meeting.fileno()]
        order |= {"meeting_fds": fds, "spin_us": options.spin_us}
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--as-rank", json.dumps(order | {"rank": rank})],
                env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds,
            )
            for rank in range(size)
        ]  # fmt: skip

    def ask(self, rows: int, tokens: int, steps: int) -> list[dict[str, Any]]:
        """Run steps; returns what each rank reports."""
        for process in self._processes:
            _pipe(process.stdin).write(json.dumps({"rows": rows, "tokens": tokens, "steps": steps}) + "\n")
            _pipe(process.stdin).flush()
        answers = [_pipe(process.stdout).readline() for process in self._processes]
        if not all(answers):
            raise SystemExit("a rank died; what it wrote is above")
        return [json.loads(answer) for answer in answers]

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            _pipe(process.stdin).close()
            process.wait(20)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def compute_as_rank(order: dict[str, Any]) -> None:
    """Load the model, and run the steps that each line asks for."""
    if order["size"] > 1 and order["pins"]:
        cores = sorted(os.sched_getaffinity(0))
        per_rank = max(len(cores) // order["size"], 1)
        first = order["rank"] * per_rank % len(cores)
        os.sched_setaffinity(0, cores[first : first + per_rank])
    import rustvllm.executor  # noqa: F401 -- before anything loads torch, because it sets how torch's threads wait

    # isort: split
    import torch

    from rustvllm import _core
    from rustvllm.attention.selector import make_attention_backend
    from rustvllm.config import LoadConfig
    from rustvllm.distributed.rank_group import ALONE, RankGroup
    from rustvllm.layers.cpu.norm import use_core_norms
    from rustvllm.layers.cpu.packer import LinearPacker
    from rustvllm.model_loader import load_model
    from rustvllm.models.interface import CausalLM
    from rustvllm.worker.cpu_decoder import use_core_decoder
    from rustvllm.worker.dense_layers import linear_options

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(order["threads"])
    threads, group = _core.CpuThreads(order["threads"]), ALONE
    if order["size"] > 1:
        store = torch.distributed.TCPStore("127.0.0.1", order["port"], order["size"], is_master=order["rank"] == 0)
        torch.distributed.init_process_group("gloo", store=store, rank=order["rank"], world_size=order["size"])
        fds, spin_us = order["meeting_fds"], order["spin_us"]
        meetings = [_core.RankMeeting.join(fd, order["rank"], spin_us=spin_us) for fd in fds]
        group = RankGroup(
            order["rank"], order["size"], torch.distributed.group.WORLD, meeting=next(iter(meetings), None)
        )
    dtype = getattr(torch, order["dtype"])

    def make_packer(outline: CausalLM) -> LinearPacker:
        options = linear_options(order["quantization"], dtype, batch_invariant=False)
        return LinearPacker(threads, options, outline, outline.tied_embedding, 1 << 30)

    config: Any = SimpleNamespace(
        model="llama-160m", path=Path(), hf_config=LLAMA_160M, architecture=LLAMA_160M["architectures"][0],
        max_model_len=4096, seed=0, model_impl="rustvllm", pooler=None,
    )  # fmt: skip
    load = LoadConfig(load_format="dummy")
    model = load_model(config, load, dtype, torch.device("cpu"), 16 << 30, make_packer, group)
    use_core_norms(model, threads)
    use_core_decoder(model)
    backend = make_attention_backend("cpu", model.kv_cache_spec, dtype, torch.device("cpu"), threads)
    runner = Steps(model, backend, dtype)
    for line in sys.stdin:
        asked = json.loads(line)
        seconds, before = [], group.time.seconds
        for _ in range(asked["steps"]):
            begin = time.perf_counter()
            runner.step(asked["rows"], asked["tokens"])
            seconds.append(time.perf_counter() - begin)
        share = (group.time.seconds - before) / sum(seconds)
        one_call = model.decoder_kernel is not None
        answers.write(json.dumps({"seconds": seconds, "share": share, "one_call": one_call}) + "\n")
        answers.flush()


class Steps:
    """Runs steps of a model over its own cache."""

    def __init__(self, model: Any, backend: Any, dtype: Any) -> None:
        self._model, self._backend, self._dtype = model, backend, dtype
        self._caches: list[Any] = []
        self._num_blocks = 0

    def step(self, rows: int, tokens: int) -> None:
        """Compute ``tokens`` tokens of each of ``rows`` requests; single tokens come after ``CONTEXT`` tokens."""
        import numpy as np
        import torch

        from rustvllm.attention.metadata import AttentionMetadata

        before = CONTEXT if tokens == 1 else 0
        per_row = -(-(before + tokens) // BLOCK_SIZE)
        if self._num_blocks < 1 + rows * per_row:
            self._num_blocks = 1 + rows * per_row
            shape = self._model.kv_cache_spec.layer_shape(self._num_blocks, BLOCK_SIZE)
            layers = self._model.kv_cache_spec.num_layers
            self._caches = [torch.zeros(shape, dtype=self._dtype) for _ in range(layers)]
        table = 1 + np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
        span = np.arange(before, before + tokens)
        slots = table[:, span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE
        starts = np.arange(rows + 1, dtype=np.int32) * tokens
        metadata = AttentionMetadata(
            BLOCK_SIZE, torch.from_numpy(table), torch.from_numpy(slots.astype(np.int32).reshape(-1)), starts,
            np.full(rows, before + tokens, np.int32),
        )  # fmt: skip
        ids = torch.arange(rows * tokens, dtype=torch.int32) % 31991
        positions = torch.from_numpy(np.tile(span, rows).astype(np.int32))
        with torch.inference_mode():
            hidden = self._model(ids, positions, self._caches, self._backend.plan(metadata))
            self._model.compute_logits(hidden[torch.from_numpy(starts[1:] - 1).long()]).argmax(-1)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure both in alternating turns, for each number of rows and for prefill."""
    alone = f"1 process x {options.ranks} threads"
    kinds = {f"{options.ranks} ranks x 1 thread, {kind}": kind for kind in options.collectives}
    names = {name: Ranks(options.ranks, 1, options, kind) for name, kind in kinds.items()}
    names[alone] = Ranks(1, options.ranks, options)
    regimes = [(rows, 1, options.num_steps) for rows in options.rows]
    regimes += [(1, tokens, max(options.num_steps // 4, 2)) for tokens in options.prefill]
    results = []
    for rows, tokens, steps in regimes:
        found: dict[str, dict[str, Any]] = {name: {"seconds": [], "shares": []} for name in names}
        for ranks in names.values():
            ranks.ask(rows, tokens, NUM_WARMUPS)
        for _ in range(options.turns):
            for name, ranks in names.items():
                answers = ranks.ask(rows, tokens, steps)
                found[name]["seconds"] += answers[0]["seconds"]
                found[name]["shares"].append([answer["share"] for answer in answers])
                found[name]["one_call"] = all(answer["one_call"] for answer in answers)
        result: dict[str, Any] = {"rows": rows, "tokens_of_each": tokens}
        for name, one in found.items():
            quartiles = statistics.quantiles(one["seconds"], n=4)
            result[name] = {
                "median_ms": round(1e3 * quartiles[1], 2),
                "quick_ms": round(1e3 * quartiles[0], 2),
                "share_in_collectives": [
                    round(statistics.median(shares), 3) for shares in zip(*one["shares"], strict=True)
                ],
                "one_call": one["one_call"],
            }
        for name in kinds:
            result[name]["ratio"] = round(result[alone]["quick_ms"] / result[name]["quick_ms"], 3)
        results.append(result)
    for ranks in names.values():
        ranks.end()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--no-pins", action="store_true", help="let the ranks' threads run on any processor")
    parser.add_argument("--collectives", nargs="+", default=["shared", "gloo"], choices=["shared", "gloo"])
    parser.add_argument("--spin-us", type=int, default=200, help="how long a rank looks for another before it sleeps")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        compute_as_rank(json.loads(options.as_rank))
        return
    report = new_report()
    report["shape"] = "llama-160m"
    report["results"] = measure(options)
    publish(report, options.output_json)


if __name__ == "__main__":
    main()
