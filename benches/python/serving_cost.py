"""What the serving path costs without a model: ``rustvllm serve --executor sim`` under ``rustvllm bench serve``.

Per row: tokens/s, latencies, and the processor time of the server per streamed token and per event, by thread, from
/proc. Server and client share the machine, so throughput is that of both; processor time is the server's alone.

    python benches/python/serving_cost.py --concurrency 1,16,64,256 --step-time 0,5
    python benches/python/serving_cost.py --bare    # the same of a server that does nothing else
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RUSTVLLM = [sys.executable, "-m", "rustvllm.entrypoints.cli.main"]
BARE = [sys.executable, str(Path(__file__).with_name("bare_stream.py"))]
TICKS = os.sysconf("SC_CLK_TCK")
READY_SECONDS = 120


def simulation(step_time: float, max_num_seqs: int) -> list[str]:
    """The command of a server of simulated steps."""
    command = [*RUSTVLLM, "serve", "--executor", "sim", "--port", "0", "--max-num-seqs", str(max_num_seqs)]
    return [*command, "--sim-step-time", str(step_time)]


@contextmanager
def serving(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A server's address and process."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        watchdog = threading.Timer(READY_SECONDS, process.kill)
        watchdog.start()
        try:
            url = ""
            for line in process.stdout or ():
                if "listening on http" in line:
                    url = line.split("listening on ")[1].split(",")[0]
                if "ready, serving" in line:
                    break
            else:
                raise SystemExit(f"the server ended before it was ready: {' '.join(command)}")
            watchdog.cancel()
            threading.Thread(target=lambda: [None for _ in process.stdout or ()], daemon=True).start()
            yield url, process.pid
        finally:
            watchdog.cancel()
            process.send_signal(signal.SIGTERM)
            process.wait(10)


def processor_seconds(pid: int) -> Counter[str]:
    """Processor time of a process and all its descendants so far, by the name of the thread; pools count as one."""
    used: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        # Python before 3.14 gives its threads no names: the event loop's is the main one, the engine's another.
        label = "main" if task.name == str(pid) else name.rstrip("0123456789_-")
        used[label] += (int(fields[11]) + int(fields[12])) / TICKS  # user, system
        for child in (task / "children").read_text().split():
            used += processor_seconds(int(child))
    return used


def bench(url: str, concurrency: int, num_prompts: int, output_len: int) -> dict[str, Any]:
    """One run of the load generator."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [*RUSTVLLM, "bench", "serve", "--base-url", url, "--max-concurrency", str(concurrency)]
        command += [
            "--num-prompts",
            str(num_prompts),
            "--random-input-len",
            "32",
            "--random-output-len",
            str(output_len),
        ]
        command += ["--ignore-eos", "--output-json", file.name, "--metric-percentiles", "50,99", "--disable-tqdm"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report: dict[str, Any] = json.load(file)
    return report


def measure(url: str, pid: int, concurrency: int, tokens: int, output_len: int) -> dict[str, Any]:
    """One row."""
    bench(url, concurrency, concurrency * 2, output_len)  # warm
    before = processor_seconds(pid)
    report = bench(url, concurrency, max(concurrency * 2, tokens // output_len), output_len)
    used = processor_seconds(pid)
    used.subtract(before)
    per_token = {
        name: 1e6 * seconds / report["total_output_tokens"] for name, seconds in used.most_common() if seconds > 0
    }
    return {
        "concurrency": concurrency,
        "failed": report["failed"],
        "output_throughput": report["output_throughput"],
        "event_throughput": report["event_throughput"],
        "tokens_per_event": report["tokens_per_event"],
        **{f"{kind}_{name}_ms": report[f"{kind}_{name}_ms"] for name in ("ttft", "itl") for kind in ("p50", "p99")},
        "server_cpu_us_per_token": sum(per_token.values()),
        "server_cpu_us_per_event": sum(per_token.values()) * report["tokens_per_event"],
        "server_cpu_us_per_token_by_thread": per_token,
        "server_cores": sum(used.values()) / report["duration"],
        "client_load": report["client_load"],
        "machine": report["machine"],
        "versions": report["versions"],
    }


def numbers(text: str) -> list[float]:
    """Numbers separated by commas."""
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Measure every step time at every concurrency and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--concurrency", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--step-time", type=numbers, default=[0.0], help="milliseconds of a simulated step")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens of a row, about")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--bare", action="store_true", help="measure bare_stream.py instead")
    parser.add_argument("--json", action="store_true")
    args, more = parser.parse_known_args()  # what is not known here goes to `rustvllm serve`
    rows = []
    for step_time in [0.0] if args.bare else args.step_time:
        with serving(BARE if args.bare else [*simulation(step_time, 256), *more]) as (url, pid):
            for concurrency in map(int, args.concurrency):
                # A row of one stream at a time would take minutes: as many tokens as ten seconds bring.
                per_second = concurrency * 1000 / max(step_time, 0.05)
                tokens = int(min(args.tokens, 10 * per_second))
                row = {"step_time_ms": step_time, **measure(url, pid, concurrency, tokens, args.output_len)}
                rows.append(row)
                if not args.json:
                    print(table_row(row), flush=True)
    if args.json:
        print(json.dumps(rows, indent=2))


def table_row(row: dict[str, Any]) -> str:
    """One row for people."""
    by_thread = ", ".join(
        f"{name} {us:.1f}" for name, us in row["server_cpu_us_per_token_by_thread"].items() if us >= 0.05
    )
    return (
        f"step {row['step_time_ms']:g} ms, {row['concurrency']:>3} streams: {row['output_throughput']:>7.0f} tok/s, "
        f"{row['tokens_per_event']:.2f} tok/event, TTFT p50 {row['p50_ttft_ms']:.2f} p99 {row['p99_ttft_ms']:.2f}, "
        f"ITL p50 {row['p50_itl_ms']:.2f} p99 {row['p99_itl_ms']:.2f} ms, "
        f"server {row['server_cpu_us_per_token']:.1f} us/tok {row['server_cpu_us_per_event']:.1f} us/event "
        f"({by_thread}), "
        f"client {row['client_load']:.2f}"
    )


if __name__ == "__main__":
    main()
