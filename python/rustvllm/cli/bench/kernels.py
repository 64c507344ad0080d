"""``rustvllm bench kernels``: attention, dense layers and the sampler, each by every contender of the device."""

from collections.abc import Sequence
from typing import Any

from rustvllm.cli.bench.arguments import whole_number
from rustvllm.cli.bench.report.machine import machine, require_release_build, versions
from rustvllm.cli.bench.report.output import check_output, publish
from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.config import devices
from rustvllm.exceptions import ConfigError

KERNELS = ("attention", "linear", "sampler")
SHAPES = ("gpt2", "qwen2.5-0.5b", "llama-3-8b")
DTYPES = ("float32", "float16", "bfloat16")


def bench_kernels(argv: Sequence[str]) -> int:
    """Run ``rustvllm bench kernels``.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: The core is a debug build, or there is no such device.
    """
    parser = FlexibleArgumentParser(
        prog="rustvllm bench kernels",
        usage="rustvllm bench kernels [flags]",
        description="Time the kernels of a model's shape by turns, and compare them with the device's limits.",
    )
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="(default: all)")
    parser.add_argument("--shape", choices=SHAPES, default="gpt2", help="model whose shapes are used (default: gpt2)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: auto)")
    parser.add_argument("--dtype", choices=DTYPES, help="(default: float32 on the CPU, bfloat16 on a GPU)")
    parser.add_argument(
        "--num-rounds",
        type=whole_number(1),
        default="5",
        metavar="N",
        help="measurements of each contender, in turns (default: 5)",
    )
    parser.add_argument("--output-json", metavar="FILE", help="also write the report to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse_unknown(unknown)
    require_release_build()
    check_output(args.output_json)
    device = args.device
    if device == "auto":
        device = "cuda" if devices.visible_gpus() else "cpu"
    elif device == "cuda" and not devices.visible_gpus():
        raise ConfigError("--device cuda needs a GPU, but this machine has none that can be used; use --device cpu")
    dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    from rustvllm.cli.bench.kernel_bench import KernelBench

    bench = KernelBench(device, dtype, args.shape, args.num_rounds)
    report: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        **bench.facts(),
        "shape": args.shape,
        "dtype": dtype,
        "ruler": bench.ruler(),
        "results": [line for name in KERNELS if name in args.kernels for line in getattr(bench, name)()],
    }
    publish(args, report, table(report))
    return 0


def table(report: dict[str, Any]) -> str:
    """For people: a line per kernel, case, sizes and contender."""
    ruler = report["ruler"]
    lines = [
        f"{report['shape']} in {report['dtype']} on {report['device']}, {report['num_threads']} threads",
        f"memory {ruler['GB/s']:.1f} GB/s, product of 2048 x 2048 matrices {ruler['GFLOP/s']:.0f} GFLOP/s",
    ]
    rates = ("ms", "GB/s", "GFLOP/s")
    for line in report["results"]:
        sizes = " ".join(
            f"{key} {value}" for key, value in line.items() if key not in {"kernel", "case", "contender", *rates}
        )
        figures = "  ".join(
            f"{line[key]:9.3f} {key}" if key == "ms" else f"{line[key]:8.1f} {key}" for key in rates if key in line
        )
        lines.append(f"{line['kernel']:<9} {line['case']:<8} {sizes:<48} {line['contender']:<12} {figures}")
    return "\n".join(lines)
