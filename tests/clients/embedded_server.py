"""The server of these tests: the embedded model, as `rustvllm serve` starts it."""

import httpx
from server_process import REAL

MODEL = "rustvllm-tiny"
COMMAND = [*REAL, "--port", "0"]


def wait_until_idle(url: str) -> None:
    """Every request has ended and every block is free again."""
    for _ in range(2000):
        load = httpx.get(f"{url}/load", timeout=60).json()
        if (load["server_load"], load["num_running"], load["num_waiting"]) == (0, 0, 0):
            assert load["num_free_blocks"] == load["num_usable_blocks"]
            return
    raise AssertionError(f"requests were left: {load}")
