"""The server of these tests: the embedded model, as `rustvllm serve` starts it."""

import time

import httpx
from server_process import REAL

MODEL = "rustvllm-tiny"
COMMAND = [*REAL, "--port", "0"]
IDLE_SECONDS = 60


def wait_until_idle(url: str) -> None:
    """Every request has ended and every block is free again."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        load = httpx.get(f"{url}/load", timeout=60).json()
        is_idle = (load["server_load"], load["num_running"], load["num_waiting"]) == (0, 0, 0)
        if is_idle and load["num_free_blocks"] == load["num_usable_blocks"]:
            return
        assert time.monotonic() < deadline, f"requests were left: {load}"
        time.sleep(0.01)
