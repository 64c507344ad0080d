"""Every kernel, as it would be launched, compiles for GPUs that are not here, within the shared memory that they have.

The functions that launch are called with tensors on the CPU; what they would launch is caught and compiled by Triton's
own compiler and assembler, which need no device. What the machine code computes, only a GPU shows.
"""

import inspect

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not made for this platform")

from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec  # noqa: E402 -- behind the skip
from rustvllm.attention.triton_backend import TritonAttentionBackend  # noqa: E402
from rustvllm.kernels import activation, draw, matmul, norm, penalties, rotary, truncation, tuning  # noqa: E402

SHARED_BYTES = {90: 227 << 10, 80: 99 << 10}
"""Of Hopper; and the least that any GPU has that untuned sizes are for."""


class Launches:
    """What was launched: the kernel, and its arguments by name."""

    def __init__(self, monkeypatch, capability):
        self.target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
        self.caught = []
        monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", self._run)
        monkeypatch.setattr(tuning, "is_tuned", lambda device: capability == 90)
        monkeypatch.setattr(tuning, "capability", lambda device: divmod(capability, 10))
        monkeypatch.setattr(tuning, "num_processors", lambda device: 132)

    @property
    def _run(self):
        caught = self.caught
        return lambda kernel, *args, grid, warmup, **kwargs: caught.append((kernel, args, kwargs))

    def compile(self):
        """Machine code of all that was caught."""
        caught, self.caught[:] = list(self.caught), []
        return [self._compile(*launch) for launch in caught]

    def variants(self):
        """Of all that was caught: how many different machine codes each kernel needs."""
        codes = {}
        for kernel, args, kwargs in self.caught:
            codes.setdefault(kernel.fn.__name__, set()).add(repr(self._specialise(kernel, args, kwargs)))
        return {name: len(different) for name, different in codes.items()}

    def _compile(self, kernel, args, kwargs):
        signature, constants, attributes, options = self._specialise(kernel, args, kwargs)
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        return triton.compile(source, target=self.target, options=options)

    def _specialise(self, kernel, args, kwargs):
        names = inspect.signature(kernel.fn).parameters
        options = {name: value for name, value in kwargs.items() if name not in names}
        arguments = inspect.signature(kernel.fn).bind(
            *args, **{name: value for name, value in kwargs.items() if name in names}
        )
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = arguments.arguments[parameter.name]
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


@pytest.fixture(params=[90, 80])
def launches(request, monkeypatch, tmp_path):
    """What would be launched on a GPU of this compute capability."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return Launches(monkeypatch, request.param)


def check(launches, *, at_least):
    compiled = launches.compile()
    assert len(compiled) >= at_least
    for kernel in compiled:
        assert kernel.metadata.shared <= SHARED_BYTES[launches.target.arch], kernel.metadata
        assert kernel.asm["cubin"]
    return compiled


@pytest.mark.parametrize(("head_dim", "dtype", "fp8"), [(128, torch.bfloat16, False), (64, torch.float16, True)])
def test_attention(launches, head_dim, dtype, fp8):
    step = AttentionMetadata(
        16, torch.zeros(2, 64, dtype=torch.int32), torch.zeros(41, dtype=torch.int32),
        np.array([0, 40, 41], np.int32), np.array([40, 1000], np.int32),
    )  # fmt: skip
    backend = TritonAttentionBackend(KVCacheSpec(1, 2, head_dim), dtype, torch.device("cpu"))
    qkv = torch.zeros(41, 12, head_dim, dtype=dtype)
    cache = torch.zeros(2, 8, 16, 2, head_dim, dtype=torch.uint8 if fp8 else dtype)
    options = {"sliding_window": 100, "soft_cap": 30.0, "alibi_slopes": [0.5] * 8} if fp8 else {}
    backend.plan(step).forward(*qkv.split([8, 2, 2], 1), cache, 0.1, **options)
    _, prompts, decodes, _ = check(launches, at_least=4)  # written, prompts, decodes, their parts put together
    if launches.target.arch == 90:
        assert "wgmma" in prompts.asm["ptx"], "Hopper's matrix instructions lie idle"
    assert "mma.sync" in decodes.asm["ptx"]


def test_steps_of_all_sizes_run_the_same_code(launches):
    """What is compiled for the first steps serves all others: no later step waits for a compiler."""
    backend = TritonAttentionBackend(KVCacheSpec(1, 2, 64), torch.float16, torch.device("cpu"))
    cache = torch.zeros(2, 8, 16, 2, 64, dtype=torch.float16)
    for num_prompts, num_decodes, longest, width in [(0, 1, 5, 1), (1, 0, 5, 16), (1, 2, 5000, 33), (3, 70, 90, 64)]:
        query_lens = np.array([5] * num_prompts + [1] * num_decodes, np.int32)
        starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        seq_lens = np.full(query_lens.size, longest, np.int32)
        table = torch.zeros(query_lens.size, width, dtype=torch.int32)
        slots = torch.zeros(int(starts[-1]) + 1, dtype=torch.int32)[1:]
        qkv = torch.zeros(int(starts[-1]), 12, 64, dtype=torch.float16)
        plan = backend.plan(AttentionMetadata(16, table, slots, starts, seq_lens))
        plan.forward(*qkv.split([8, 2, 2], 1), cache, 0.1)
    # Prompts and decodes have sizes of their own.
    assert launches.variants() == {"_kv_write_kernel": 1, "_attention_kernel": 2, "_combine_kernel": 1}


def test_everything_else(launches):
    x = torch.zeros(4, 512, dtype=torch.bfloat16)
    weight = x[0]
    norm.add_rms_norm(x, x, weight, 1e-5)
    norm.layer_norm(x, weight, weight, 1e-5)
    rotary.rotary(x.view(4, 8, 64), x[:, :16], x[:, :16], interleaved=True)
    activation.silu_and_mul(x)
    activation.gelu_and_mul(x)
    matmul.linear(x, torch.zeros(4096, 512, dtype=torch.bfloat16), None)
    logits, ids = torch.zeros(4, 32000), torch.zeros(4, dtype=torch.int64)
    ones = torch.ones(4)
    counts = torch.zeros(4, 32000, dtype=torch.int32)
    penalties.apply_penalties(logits, ids, ones, ones, ones, counts, counts > 0)
    truncation.apply_top_k_top_p(logits, ids, ones)
    draw.draw(logits, ids, ids)
    draw.counter_uniform(ids, ids)
    check(launches, at_least=10)
