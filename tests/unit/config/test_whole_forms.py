"""In which form whole numbers with scales are kept, where activations are rounded and where they are not."""

import pytest
import torch

from rustvllm import _core
from rustvllm.config.checkpoint.gguf_file import WHOLE_TYPES
from rustvllm.config.checkpoint.whole_forms import NumberForm, common_form
from rustvllm.layers.cpu.linear import CoreLinear
from rustvllm.layers.cpu.options import LinearOptions


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (("Q8_0", "Q8_0"), NumberForm(32, 8, "f16")),
        (("Q8_0", "Q4_0"), NumberForm(32, 8, "f16")),
        (("IQ4_NL", "Q5_0", "Q4_0"), NumberForm(32, 8, "f16")),
        (("Q8_0", "MXFP4"), NumberForm(32)),
        (("MXFP4", "MXFP4"), NumberForm(32, 4, "bf16", "codes")),
        (("Q4_0", "MXFP4"), NumberForm(32)),
        (("MXFP4", "Q4_1"), NumberForm(32, 8, "f32", "minimum")),
        (("Q8_0", "Q4_1"), NumberForm(32, 8, "f32", "minimum")),
        (("Q8_0", "Q6_K"), NumberForm(16)),
        (("Q4_K", "Q5_K"), NumberForm(32, 8, "two-level", "minimum")),
    ],
)
def test_parts_of_several_types_have_one_form(types, expected):
    assert common_form([WHOLE_TYPES[name] for name in types]) == expected


@pytest.mark.parametrize("name", WHOLE_TYPES)
def test_only_8_bits_without_minima_have_wider_scales_next_to_activations_as_they_are(name):
    form = WHOLE_TYPES[name]
    assert form.as_multiplied(256, round_activations=True) == form
    kept = form.as_multiplied(256, round_activations=False)
    is_widened = name in ("Q8_0", "Q5_0", "IQ4_NL")
    assert kept == (NumberForm(32) if is_widened else form)


def test_groups_that_cannot_be_rounded_with_have_wider_scales():
    form = NumberForm(8, 8, "bf16")
    assert form.as_multiplied(256, round_activations=True) == NumberForm(8)


@pytest.mark.parametrize(
    ("rounds", "group_size", "per_weight"), [(True, 32, 1.0625), (True, 128, 1.015625), (False, 32, 1.125)]
)
def test_own_weights_of_8_bits_take_what_is_said(rounds, group_size, per_weight):
    options = LinearOptions("core", "int8", group_size, round_activations=rounds)
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    threads = _core.CpuThreads(1)
    linear = CoreLinear(threads, weight, None, options.packed_kind, group_size, scales=options.form.scales)
    assert options.form.num_bytes(64, 256) == per_weight * weight.numel()
    assert linear.nbytes == pytest.approx(per_weight * weight.numel(), rel=0.02)
    assert linear.packed.kind == ("w8a8" if rounds else "int8")
    torch.testing.assert_close(linear.unpack(64), weight, atol=0.02, rtol=0)
