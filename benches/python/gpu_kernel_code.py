"""Reports the registers, spills and shared memory of each Triton kernel's machine code as JSON; needs no GPU.

    python benches/python/gpu_kernel_code.py [--capabilities 80 90 100] [--kernels attention norm] [--output-json FILE]

The script calls the launching functions with tensors on the CPU and catches their launches. Triton compiles the caught
kernels, and the ptxas in its wheel assembles them and reports the resources. A spill is memory that a kernel reads and
writes because it has too few registers: it costs time, and a new one is a mistake (``tests/unit/test_kernel_code.py``).
"""

import argparse
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.nvidia import compiler

from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec
from rustvllm.attention.static_batch import StaticDraftBatch
from rustvllm.attention.triton_backend import TritonAttentionBackend
from rustvllm.kernels import (
    activation,
    draw,
    known_ids,
    lora,
    matmul,
    norm,
    penalties,
    quantized_matmul,
    rotary,
    rotary_write,
    tile_list,
    truncation,
    tuning,
    verify,
)

CAPABILITIES = (80, 90, 100)
CPU = torch.device("cpu")


class Launches:
    """Catches launches: the kernel, its arguments by position, and those by name."""

    def __init__(self, capability: int) -> None:
        self.target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
        self.caught: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._stands_in = {
            (triton.runtime.jit.JITFunction, "run"): self._catch(),
            (tuning, "is_tuned"): lambda _: capability == 90,
            (tuning, "capability"): lambda _: divmod(capability, 10),
            (tuning, "num_processors"): lambda _: 132,
        }

    def _catch(self) -> Callable[..., None]:
        def run(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
            del grid, warmup
            self.caught.append((kernel, args, kwargs))

        return run

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Catch all launches within the context instead of executing them."""
        before = {(owner, name): getattr(owner, name) for owner, name in self._stands_in}
        for (owner, name), value in self._stands_in.items():
            setattr(owner, name, value)
        try:
            yield
        finally:
            for (owner, name), value in before.items():
                setattr(owner, name, value)

    def compiled(self) -> list[Any]:
        """The machine code of all caught launches."""
        caught, self.caught[:] = list(self.caught), []
        with self.catching():
            return [self._compile(*launch) for launch in caught]

    def variants(self) -> dict[str, int]:
        """How many different machine codes each kernel needs for the caught launches."""
        codes: dict[str, set[str]] = {}
        for kernel, args, kwargs in self.caught:
            codes.setdefault(kernel.fn.__name__, set()).add(repr(self._specialise(kernel, args, kwargs)))
        return {name: len(different) for name, different in codes.items()}

    def _compile(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature, constants, attributes, options = self._specialise(kernel, args, kwargs)
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        return triton.compile(source, target=self.target, options=options)

    def _specialise(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
        parameters = inspect.signature(kernel.fn).parameters
        options = {name: value for name, value in kwargs.items() if name not in parameters}
        own = {name: value for name, value in kwargs.items() if name in parameters}
        arguments = inspect.signature(kernel.fn).bind(*args, **own).arguments
        signature: dict[str, Any] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for index, parameter in enumerate(kernel.params):
            value = arguments[parameter.name]
            is_special = not parameter.do_not_specialize and not isinstance(value, float)
            if parameter.is_constexpr or (is_special and isinstance(value, int) and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = triton.runtime.jit.mangle_type(value)
            is_special = is_special and not parameter.do_not_specialize_on_alignment
            address = value.data_ptr() if torch.is_tensor(value) else value
            if is_special and address % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
        return signature, constants, attributes, options


def launch_attention(head_dim: int, dtype: torch.dtype, *, fp8: bool = False, **options: Any) -> None:
    """Launch a prompt, and a decode that is long enough to be split."""
    lengths = np.array([40, 1000], np.int32)
    table, slots = torch.zeros(2, 64, dtype=torch.int32), torch.zeros(41, dtype=torch.int32)
    step = AttentionMetadata(16, table, slots, np.array([0, 40, 41], np.int32), lengths)
    backend = TritonAttentionBackend(KVCacheSpec(1, 2, head_dim), dtype, CPU)
    qkv = torch.zeros(41, 12, head_dim, dtype=dtype)
    cache = torch.zeros(2, 8, 16, 2, head_dim, dtype=torch.uint8 if fp8 else dtype)
    backend.plan(step).forward(*qkv.split([8, 2, 2], 1), cache, 0.1, **options)


def launch_draft_attention(head_dim: int, dtype: torch.dtype, width: int) -> None:
    """Launch a graph of two requests with ``width`` tokens each."""
    backend = TritonAttentionBackend(KVCacheSpec(1, 2, head_dim), dtype, CPU)
    of_requests, slots = torch.zeros(3, dtype=torch.int32), torch.zeros(2 * width, dtype=torch.int32)
    table = torch.zeros(2, 64, dtype=torch.int32)
    batch = StaticDraftBatch(16, table, of_requests[:2], slots, of_requests, of_requests[:2], 1024, width)
    qkv = torch.zeros(2 * width, 12, head_dim, dtype=dtype)
    cache = torch.zeros(2, 8, 16, 2, head_dim, dtype=dtype)
    backend.plan_static_drafts(batch).forward(*qkv.split([8, 2, 2], 1), cache, 0.1)


def launch_rotary_write(head_dim: int, *, norms: bool, fp8: bool, by_head: bool = False) -> None:
    """Launch a step of four tokens with 8 heads over 2 KV heads, or 4 over 4 of which a quarter is rotated."""
    heads, turned = (4, head_dim // 4) if by_head else (8, head_dim)
    qkv, ids = torch.zeros(4, 12, head_dim, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    table, weight = torch.zeros(64, turned, dtype=torch.bfloat16), torch.zeros(head_dim, dtype=torch.bfloat16)
    kv_heads = (12 - heads) // 2
    cache = torch.zeros(2, 8, 16, kv_heads, head_dim, dtype=torch.uint8 if fp8 else torch.bfloat16)
    options = {"norm_weights": (weight, weight.clone()) if norms else None, "is_by_head": by_head}
    rotary_write.rotary_write(qkv, heads, ids, table, cache, ids, eps=1e-6, **options)


def launch_sampler() -> None:
    """Launch penalties, truncation and draws with 151,936 ids."""
    logits, ids, ones = torch.zeros(4, 151936), torch.zeros(4, dtype=torch.int64), torch.ones(4)
    counts = torch.zeros(4, 151936, dtype=torch.int32)
    penalties.apply_penalties(logits, ids, ids, ones, ones, ones, counts, counts > 0)
    truncation.apply_top_k_top_p(logits, ids, ones)
    truncation.apply_top_n_sigma(logits, ones)
    draw.draw(logits, ids, ids)
    draw.counter_uniform(ids, ids)
    inputs, ids = torch.zeros((5, 16), dtype=torch.int32), torch.zeros((3, 16), dtype=torch.int32)
    static = draw.StaticDraws(ones, inputs[:2], inputs[2], inputs[3], inputs[4], ids, ids[0], ids[1])
    for dtype in (torch.float32, torch.bfloat16):
        draw.argmax(logits.to(dtype))
        draw.choose(logits.to(dtype), static)
    verify.verify(*ids[:2], torch.zeros(5, dtype=torch.int32), 4, ids, ids[2], which=ids[0], rows=ids[1])


def launch_layers() -> None:
    """Launch norms, rotary positions, activations, products."""
    x = torch.zeros(4, 1024, dtype=torch.bfloat16)
    norm.rms_norm(x, x[0], 1e-5)
    norm.add_rms_norm(x, x, x[0], 1e-5)
    norm.norm_add_rms_norm(x, x, x[0], x[0], 1e-5, weight_offset=1.0)
    norm.add_layer_norm(x, x, x[0], x[0], 1e-5)
    norm.layer_norm(x, x[0], x[0], 1e-5)
    rotary.rotary(x.view(4, 16, 64), x[:, :16], x[:, :16], interleaved=True)
    activation.silu_and_mul(x)
    activation.gelu_and_mul(x)
    matmul.linear(x, torch.zeros(4096, 1024, dtype=torch.bfloat16), None)


def launch_adapters(dtype: torch.dtype, *, has_bias: bool) -> None:
    """Launch two adapters of a fused layer of three parts."""
    rows, tiles = lora.make_tiles([(0, np.arange(20, dtype=np.int32)), (1, np.arange(20, 40, dtype=np.int32))])
    x, out = torch.zeros(40, 4096, dtype=dtype), torch.zeros(40, 6144, dtype=dtype)
    table = torch.zeros(2, lora.LAYER_COLUMNS + 3 * lora.PART_COLUMNS, dtype=torch.int64)
    of_step = lora.AdapterTiles(torch.from_numpy(rows), torch.from_numpy(tiles))
    lora.add_adapters(x, out, out[0] if has_bias else None, of_step, table, num_ranks=48, num_outputs=4096)


def launch_quantized(dtype: torch.dtype, bits: int, zeros: str, group_size: int) -> None:
    """Launch few rows, which are split, many rows, both with additions, and the unpacking of the weight."""
    shape, groups = (4096, 2048), (2048 // group_size, 4096)
    stored = (4096, quantized_matmul.nibble_bytes(2048)) if bits == 4 else shape
    kept = torch.float16 if bits == 4 else torch.float32
    offsets = {"middle": None, "point": torch.uint8, "minimum": kept}[zeros]
    weight = quantized_matmul.QuantizedWeight(
        torch.zeros(stored, dtype=torch.uint8 if bits == 4 else torch.int8),
        torch.zeros(groups, dtype=kept),
        None if offsets is None else torch.zeros(groups, dtype=offsets),
        2048,
        group_size,
    )
    x, out = torch.zeros(40, 2048, dtype=dtype), torch.zeros(40, 4096, dtype=dtype)
    for rows in (3, 40):
        quantized_matmul.quantized_linear(x[:rows], weight)
        quantized_matmul.quantized_linear(x[:rows], weight, out[0], out[:rows])
    quantized_matmul.quantized_linear(x, weight, is_invariant=True)
    quantized_matmul.unpack(weight, dtype)


def launch_tiles() -> None:
    """Launch the computation of tiles for a mixed step in a graph."""
    starts, tiles = torch.tensor([0, 40, 41, 41], dtype=torch.int32), torch.zeros((2, 8), dtype=torch.int32)
    tile_list.list_tiles(*tiles, starts, 8, skip_decodes=True)
    tile_list.list_decodes(*tiles[:, :3], starts)
    known_ids.known_ids(*tiles, starts)


BENT = {"sliding_window": 100, "soft_cap": 30.0, "alibi_slopes": [0.5] * 8}
CASES: dict[str, Callable[[], None]] = {
    "attention 64 bfloat16": lambda: launch_attention(64, torch.bfloat16),
    "attention 128 bfloat16": lambda: launch_attention(128, torch.bfloat16),
    "attention 256 bfloat16": lambda: launch_attention(256, torch.bfloat16),
    "attention 64 float16 fp8 bent": lambda: launch_attention(64, torch.float16, fp8=True, **BENT),
    "attention 128 bfloat16 fp8": lambda: launch_attention(128, torch.bfloat16, fp8=True),
    "attention 64 bfloat16 with drafts": lambda: launch_draft_attention(64, torch.bfloat16, 4),
    "attention 128 bfloat16 with drafts": lambda: launch_draft_attention(128, torch.bfloat16, 8),
    "attention 128 bfloat16 with many drafts": lambda: launch_draft_attention(128, torch.bfloat16, 17),
    "attention 256 bfloat16 with drafts": lambda: launch_draft_attention(256, torch.bfloat16, 8),
    "rotary and write 128": lambda: launch_rotary_write(128, norms=False, fp8=False),
    "norms, rotary and write 128": lambda: launch_rotary_write(128, norms=True, fp8=False),
    "rotary and write 64 by head": lambda: launch_rotary_write(64, norms=False, fp8=False, by_head=True),
    "norms, rotary and write 256 fp8": lambda: launch_rotary_write(256, norms=True, fp8=True),
    "layers": launch_layers,
    "adapters bfloat16": lambda: launch_adapters(torch.bfloat16, has_bias=False),
    "adapters float16 with a bias": lambda: launch_adapters(torch.float16, has_bias=True),
    "quantised bfloat16, AWQ": lambda: launch_quantized(torch.bfloat16, 4, "point", 128),
    "quantised float16, AWQ": lambda: launch_quantized(torch.float16, 4, "point", 128),
    "quantised bfloat16, Q4_0": lambda: launch_quantized(torch.bfloat16, 4, "middle", 32),
    "quantised bfloat16, Q4_K": lambda: launch_quantized(torch.bfloat16, 4, "minimum", 32),
    "quantised bfloat16, small groups": lambda: launch_quantized(torch.bfloat16, 4, "point", 16),
    "quantised bfloat16, rows of 8 bits": lambda: launch_quantized(torch.bfloat16, 8, "middle", 2048),
    "quantised bfloat16, Q8_0": lambda: launch_quantized(torch.bfloat16, 8, "middle", 32),
    "quantised bfloat16, Q6_K": lambda: launch_quantized(torch.bfloat16, 8, "minimum", 16),
    "tiles": launch_tiles,
    "sampler": launch_sampler,
}


def costs(capability: int, cases: dict[str, Callable[[], None]]) -> list[dict[str, Any]]:
    """A row for each machine code: its case, kernel, registers of a thread, bytes of spills, bytes of shared memory."""
    rows = []
    for case, launch in cases.items():
        launches = Launches(capability)
        with launches.catching():
            launch()
        for code in launches.compiled():
            row = {"capability": capability, "case": case, "kernel": code.metadata.name, "shared": code.metadata.shared}
            rows.append(row | {"warps": code.metadata.num_warps} | assembled(code.asm["ptx"], capability))
    return rows


def assembled(ptx: str, capability: int) -> dict[str, int]:
    """What ptxas reports for a kernel, assembled with Triton's options."""
    ptxas = compiler.get_ptxas(capability).path
    target = compiler.sm_arch_from_capability(capability)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="ascii")
        command = [ptxas, "-lineinfo", "-v", "--regAllocOptLevel=2", f"--gpu-name={target}", source]
        command += ["-o", str(Path(folder) / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stderr + done.stdout
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    if spills is None or registers is None:
        raise RuntimeError(f"{ptxas} says neither registers nor spills: {said[:300]!r}")
    return {"registers": int(registers[1]), "spilled": int(spills[1]) + int(spills[2])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", nargs="+", type=int, choices=CAPABILITIES, default=list(CAPABILITIES))
    parser.add_argument("--kernels", nargs="+", default=[""], help="cases whose names begin so (default: all)")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    chosen = {name: launch for name, launch in CASES.items() if name.startswith(tuple(args.kernels))}
    if not chosen:
        sys.exit(f"no case begins with {' or '.join(args.kernels)}; there are: {', '.join(CASES)}")
    rows = [row for capability in args.capabilities for row in costs(capability, chosen)]
    report = {"torch": torch.__version__, "triton": triton.__version__, "kernels": rows}
    if args.output_json:
        args.output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
