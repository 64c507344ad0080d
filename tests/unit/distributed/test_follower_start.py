"""The process of a rank other than 0, before it has loaded anything."""

import subprocess
import sys


def test_the_link_to_rank_0_is_there_before_torch_is_loaded() -> None:
    """Loading torch takes seconds. A process that loaded it first would not notice that rank 0 was killed meanwhile."""
    program = "import sys; import rustvllm.worker.process; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "False\n"
