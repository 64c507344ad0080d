"""Every form of compressed-tensors as the package itself writes it, and what the package says that it means."""

import pytest
import torch
from safetensors.torch import save_file

from rustvllm.byte_progress import ByteProgress
from rustvllm.config.checkpoint.quantized_folders import read_quantization
from rustvllm.model_loader.checkpoint import read_headers
from rustvllm.model_loader.quantized_numbers import dense_rows
from rustvllm.model_loader.quantized_tensors import join_quantized
from rustvllm.model_loader.reading import TensorReader

pytest.importorskip("compressed_tensors", reason="the compressed-tensors package is not installed")
GROUP = {"strategy": "group", "group_size": 32}
CHANNEL, TENSOR = {"strategy": "channel"}, {"strategy": "tensor"}
BLOCK = {"strategy": "block", "block_structure": [32, 48]}
OUT_FEATURES, IN_FEATURES = 50, 128


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("form", "bits", "kind", "strategy"),
    [
        *(("pack-quantized", bits, "int", strategy) for bits in (4, 8) for strategy in (GROUP, CHANNEL)),
        *(("int-quantized", 8, "int", strategy) for strategy in (CHANNEL, TENSOR)),
        ("naive-quantized", 8, "int", GROUP),
        *(("float-quantized", 8, "float", strategy) for strategy in (CHANNEL, TENSOR, BLOCK)),
    ],
)
def test_the_numbers_are_the_packages(form, bits, kind, strategy, symmetric, tmp_path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if kind == "float" and not symmetric:
        pytest.skip("floating-point numbers have no zero points")
    args = QuantizationArgs(num_bits=bits, type=kind, symmetric=symmetric, **strategy)
    scheme, compressor = (
        QuantizationScheme(targets=["Linear"], weights=args),
        BaseCompressor.get_value_from_registry(form),
    )
    shapes = {"group": (OUT_FEATURES, IN_FEATURES // 32), "channel": (OUT_FEATURES, 1), "tensor": (1,), "block": (2, 3)}
    shape = shapes[strategy["strategy"]]
    torch.manual_seed(0)
    scale = (torch.rand(shape) * 0.1 + 0.05) / (20 if kind == "float" else 1)
    layer = {"weight": torch.randn(OUT_FEATURES, IN_FEATURES), "weight_scale": scale}
    if not symmetric:
        half = 1 << (bits - 1)
        layer["weight_zero_point"] = torch.randint(-half, half, shape, dtype=torch.int8)
    stored = compressor.compress(dict(layer), scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    save_file({f"l.{name}": tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    weights = args.model_dump(mode="json")
    how = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}
    read = read_quantization({"quantization_config": how}, tmp_path)
    joined = join_quantized(read_headers(tmp_path), read, tmp_path, is_turned=False)
    with TensorReader(ByteProgress("loading", "m", is_shown=False)) as reader:
        rows = torch.cat([rows for _, rows in dense_rows(reader, joined["l.weight"])])
    assert torch.equal(rows, expected.float())
