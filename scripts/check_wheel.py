"""Builds the release wheel and proves it: one abi3 file of a small size that serves from an environment of its own.

The environment is a new virtual environment that borrows the dependencies (torch above all) of the interpreter running
this script, through a `.pth` file, and has nothing of the source tree. Called by `make wheel`.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DIST = REPOSITORY / "dist"
MAX_WHEEL_BYTES = 20 * 1000 * 1000
START_SECONDS = 180
STOP_SECONDS = 10


def fail(message: str) -> None:
    """Ends the check with a message."""
    sys.exit(f"wheel check FAILED: {message}")


def build_wheel() -> Path:
    """Builds into an emptied `dist/` and returns the one wheel, its name and size checked."""
    shutil.rmtree(DIST, ignore_errors=True)
    locked = ["--locked"] if os.environ.get("CI") else []
    maturin = Path(sysconfig.get_path("scripts")) / "maturin"
    subprocess.run([maturin, "build", "--release", *locked, "--quiet", "--out", DIST], cwd=REPOSITORY, check=True)
    wheels = sorted(DIST.iterdir())
    if len(wheels) != 1 or not re.fullmatch(r"rustvllm-[^-]+-cp311-abi3-[^-]+\.whl", wheels[0].name):
        fail(f"expected one cp311-abi3 wheel in {DIST}, found {[wheel.name for wheel in wheels]}")
    size = wheels[0].stat().st_size
    if size >= MAX_WHEEL_BYTES:
        fail(f"{wheels[0].name} has {size:,} bytes; the limit is {MAX_WHEEL_BYTES:,}")
    print(f"built {wheels[0].name}, {size / 1e6:.2f} MB")
    return wheels[0]


def make_environment(folder: Path, wheel: Path) -> Path:
    """Installs the wheel into a new environment that sees this interpreter's packages; returns its `bin`."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    # `site` reads no .pth file of a borrowed folder, so an editable install of the source tree stays out of sight.
    (packages / "borrowed_packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--force-reinstall", wheel], check=True)
    checked = subprocess.run([python, "-m", "pip", "check"], check=False, capture_output=True, text=True)
    unmet = [line for line in checked.stdout.splitlines() if line.startswith("rustvllm ")]
    if unmet:
        fail("dependencies the environment does not meet:\n" + "\n".join(unmet))
    where = [python, "-c", "import rustvllm, rustvllm._core as core; print(rustvllm.__file__, core.build_profile)"]
    found = subprocess.run(where, cwd=folder, check=True, capture_output=True, text=True).stdout.split()
    if not Path(found[0]).is_relative_to(folder) or found[1] != "release":
        fail(f"imported rustvllm from {found[0]} with a {found[1]} core; expected a release core under {folder}")
    return folder / "bin"


def check_version(command: Path, wheel: Path) -> None:
    """The command line reports the version in the wheel's name."""
    printed = subprocess.run([command, "--version"], check=True, capture_output=True, text=True, cwd="/").stdout
    version = wheel.name.split("-")[1]
    if version not in printed:
        fail(f"`rustvllm --version` printed {printed!r}; expected {version}")
    print(f"rustvllm --version: {printed.strip()}")


def post(url: str, body: dict[str, object]) -> dict[str, object]:
    """Sends JSON, returns the JSON answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    """Polls `/health` until it answers 200."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            fail(f"the server ended by itself with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    fail(f"the server was not healthy after {START_SECONDS} s")


def check_serving(command: Path, folder: Path) -> None:
    """`rustvllm serve` of the embedded model answers one completion and ends when interrupted."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [command, "serve", "--host", "127.0.0.1", "--port", str(port)], cwd=folder, stdout=sink, stderr=sink
        )
    try:
        wait_until_healthy(url, server)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
            model = json.load(response)["data"][0]["id"]
        with urllib.request.urlopen(f"{url}/dashboard", timeout=10) as response:
            if b"<canvas" not in response.read():
                fail("/dashboard is not the live page")
        answer = post(f"{url}/v1/completions", {"model": model, "prompt": "Once upon a time", "max_tokens": 16})
        text = answer["choices"][0]["text"]
        if not text.strip():
            fail(f"the completion is empty: {answer}")
        print(f"served {model}: {text!r}")
        server.send_signal(signal.SIGINT)
        status = server.wait(STOP_SECONDS)
        if status not in (0, 130, -signal.SIGINT):
            fail(f"the interrupted server ended with status {status}")
    except BaseException:
        print(log.read_text(errors="replace"), file=sys.stderr)
        raise
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def main() -> None:
    """Build, install, ask for the version, serve."""
    wheel = build_wheel()
    with tempfile.TemporaryDirectory(prefix="rustvllm-wheel-") as name:
        folder = Path(name)
        command = make_environment(folder, wheel) / "rustvllm"
        check_version(command, wheel)
        check_serving(command, folder)
    print("wheel check passed")


if __name__ == "__main__":
    main()
