"""``rustvllm serve`` over the fake engine, as a program: the process tests start it in place of the real command.

Environment: FAKE_LOAD_SECONDS, FAKE_LOAD_ERROR (text of a ModelLoadError), FAKE_LOAD_BUG (text of a RuntimeError),
FAKE_STEP_SECONDS, FAKE_DIE_SECONDS (after loading, the engine dies), FAKE_STUCK_SHUTDOWN (its shutdown never returns).
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def build_engine():
    seconds = float(os.environ.get("FAKE_LOAD_SECONDS", "0"))
    time.sleep(seconds)
    if message := os.environ.get("FAKE_LOAD_ERROR"):
        from rustvllm.exceptions import ModelLoadError

        raise ModelLoadError(message)
    if message := os.environ.get("FAKE_LOAD_BUG"):
        raise RuntimeError(message)
    from fake_engine import FakeEngine

    engine = FakeEngine(step_seconds=float(os.environ.get("FAKE_STEP_SECONDS", "0")), max_model_len=1_000_000)
    if seconds := os.environ.get("FAKE_DIE_SECONDS"):
        threading.Timer(float(seconds), lambda: setattr(engine, "errored", True)).start()
    if os.environ.get("FAKE_STUCK_SHUTDOWN"):
        engine.shutdown = lambda: time.sleep(3600)
    return engine


def main() -> int:
    from rustvllm.server.launch.serve import add_cli_args, add_unsupported_args, run_server

    parser = add_unsupported_args(add_cli_args(argparse.ArgumentParser(prog="serve_fake")))
    return run_server(parser.parse_args(), build_engine)


if __name__ == "__main__":
    sys.exit(main())
