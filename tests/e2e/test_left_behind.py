"""An engine of several ranks that a program never shuts down."""

import os
import subprocess
import sys
from pathlib import Path

LEFT_BEHIND = """
import atexit, os, threading
from pathlib import Path

def look():
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print(sorted(name for name in names if "gloo" in name or "tcpstore" in name), flush=True)
    print([thread.name for thread in threading.enumerate() if "rank" in thread.name], flush=True)

if __name__ == "__main__":
    from rank_engines import SMALL
    from rustvllm import LLM, SamplingParams
    atexit.register(look)  # exit hooks run last in, first out
    llm = LLM(**SMALL, tensor_parallel_size=2)
    llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
    look()
"""


def test_an_llm_that_is_never_shut_down_ends_its_ranks_and_threads_before_the_interpreter(tmp_path: Path) -> None:
    """Threads of gloo that outlive the interpreter find what they work with gone."""
    script = tmp_path / "left_behind.py"
    script.write_text(LEFT_BEHIND)
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    running, watching, *after = ended.stdout.splitlines()[-4:]
    assert "gloo" in running
    assert "rustvllm-rank-watch" in watching
    assert after == ["[]", "[]"], ended.stdout
