"""The process of a rank that follows, before it has loaded anything."""

import subprocess
import sys


def test_the_link_to_rank_0_is_there_before_torch_is_loaded() -> None:
    """Loading torch takes seconds; a process that began with it would outlive a rank 0 that is killed meanwhile."""
    program = "import sys; import rustvllm.worker.process; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "False\n"
