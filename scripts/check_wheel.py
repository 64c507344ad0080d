"""Builds the release wheel and the source distribution, and proves both.

The wheel is one abi3 file of a small size for manylinux_2_28 (`auditwheel`), installs from a folder as from an index,
and serves from an environment without a compiler. From the source distribution alone the same wheel is built again,
without optimisation and as far as its files: `twine` checks what an index would show of both. Called by `make wheel`.

The environment is a new virtual environment that borrows the dependencies (torch above all) of the interpreter running
this script, through a `.pth` file, and has nothing of the source tree.
"""

import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import venv
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DIST = REPOSITORY / "dist"
MAX_WHEEL_BYTES = 20 * 1000 * 1000
START_SECONDS = 180
STOP_SECONDS = 10
MANYLINUX = "manylinux_2_28"
"""The oldest C library that the wheel runs with; `crates/rustvllm-py/build.rs` links it so."""
SCRIPTS = Path(sysconfig.get_path("scripts"))
COMPILERS = ("cc", "gcc", "clang", "ld", "cargo", "rustc")


def fail(message: str) -> None:
    """Ends the check with a message."""
    sys.exit(f"wheel check FAILED: {message}")


def build_wheel() -> Path:
    """Builds into an emptied `dist/` and returns the one wheel, its name and size checked."""
    shutil.rmtree(DIST, ignore_errors=True)
    locked = ["--locked"] if os.environ.get("CI") else []
    # maturin itself refuses to name a wheel so that needs a newer C library.
    compatible = ["--compatibility", MANYLINUX] if platform.machine() == "x86_64" else []
    build = [SCRIPTS / "maturin", "build", "--release", *locked, *compatible, "--quiet", "--out", DIST]
    subprocess.run(build, cwd=REPOSITORY, check=True)
    wheels = sorted(DIST.iterdir())
    if len(wheels) != 1 or not re.fullmatch(r"rustvllm-[^-]+-cp311-abi3-[^-]+\.whl", wheels[0].name):
        fail(f"expected one cp311-abi3 wheel in {DIST}, found {[wheel.name for wheel in wheels]}")
    size = wheels[0].stat().st_size
    if size >= MAX_WHEEL_BYTES:
        fail(f"{wheels[0].name} has {size:,} bytes; the limit is {MAX_WHEEL_BYTES:,}")
    print(f"built {wheels[0].name}, {size / 1e6:.2f} MB")
    return wheels[0]


def build_source_distribution() -> Path:
    """The source distribution, next to the wheel."""
    # Its warnings are about fields that only crates.io reads.
    made = subprocess.run(
        [SCRIPTS / "maturin", "sdist", "--out", DIST], cwd=REPOSITORY, check=False, capture_output=True, text=True
    )
    archives = sorted(DIST.glob("*.tar.gz"))
    if made.returncode or len(archives) != 1:
        fail(f"expected one source distribution in {DIST}, found {archives}\n{made.stderr}")
    print(f"built {archives[0].name}, {archives[0].stat().st_size / 1e6:.2f} MB")
    return archives[0]


def check_metadata(wheel: Path, archive: Path) -> None:
    """What an index checks and shows, and which systems the wheel says and is for."""
    twine = [sys.executable, "-m", "twine", "check", "--strict", wheel, archive]
    checked = subprocess.run(twine, check=False, capture_output=True, text=True)
    if checked.returncode:
        fail(f"twine check --strict: {checked.stdout}{checked.stderr}")
    print("twine check --strict: passed")
    if platform.machine() != "x86_64":
        return
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel], check=True, capture_output=True, text=True
    )
    found = re.search(r'following platform tag:\s+"([^"]+)"', shown.stdout)
    wanted = f"{MANYLINUX}_{platform.machine()}"
    if found is None or found[1] != wanted or wanted not in wheel.name:
        fail(f"{wheel.name} must be for {wanted}; auditwheel says:\n{shown.stdout}")
    print(f"auditwheel: {found[1]}")


def check_source_distribution(archive: Path, wheel: Path, folder: Path) -> None:
    """A wheel with the same files is built from it, away from the repository.

    It is not optimised, which would take as long as all else here; the target folder is the repository's, so that the
    dependencies that its tests have compiled need not be compiled again.
    """
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    # Offline and not locked: the lock file loses the members of the workspace that are not packed.
    command = [SCRIPTS / "maturin", "build", "--profile", "dev", "--offline", "--quiet", "--out", folder / "rebuilt"]
    environment = {**os.environ, "CARGO_TARGET_DIR": str(REPOSITORY / "target"), "CARGO_PROFILE_DEV_DEBUG": "false"}
    subprocess.run(command, cwd=source, env=environment, check=True)
    (rebuilt,) = (folder / "rebuilt").iterdir()
    files = [_files_of(each) for each in (wheel, rebuilt)]
    if files[0] != files[1]:
        fail(f"{archive.name} builds a wheel with other files: {sorted(files[0] ^ files[1])}")
    print(f"{archive.name} builds a wheel with the same {len(files[0])} files")


def _files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as packed:
        return {name for name in packed.namelist() if ".dist-info/sboms/" not in name}


def bare_environment(command: Path) -> dict[str, str]:
    """Variables of a process that finds the programs of its environment alone."""
    found = [name for name in COMPILERS if shutil.which(name, path=str(command.parent))]
    if found:
        fail(f"{command.parent} has {found}: it is not bare")
    return {"PATH": str(command.parent), "HOME": str(command.parent.parent)}


def make_environment(folder: Path, wheel: Path) -> Path:
    """Installs the wheel into a new environment that sees this interpreter's packages; returns its `bin`."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    # `site` reads no .pth file of a borrowed folder, so an editable install of the source tree stays out of sight.
    (packages / "borrowed_packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # By its name, from a folder in place of an index: the tags in the file's name must be those of this machine.
    wanted = f"rustvllm=={wheel.name.split('-')[1]}"
    index = ["--no-index", "--find-links", wheel.parent, "--only-binary", ":all:"]
    subprocess.run([*pip, "install", *index, "--no-deps", "--force-reinstall", wanted], check=True)
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
    printed = subprocess.run(
        [command, "--version"], check=True, capture_output=True, text=True, cwd="/", env=bare_environment(command)
    ).stdout
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
            [command, "serve", "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            stdout=sink,
            stderr=sink,
            env=bare_environment(command),
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
    """Build, audit, install, ask for the version, serve, build again from the sources."""
    wheel = build_wheel()
    archive = build_source_distribution()
    check_metadata(wheel, archive)
    with tempfile.TemporaryDirectory(prefix="rustvllm-wheel-") as name:
        folder = Path(name)
        command = make_environment(folder, wheel) / "rustvllm"
        check_version(command, wheel)
        check_serving(command, folder)
        check_source_distribution(archive, wheel, folder)
    print("wheel check passed")


if __name__ == "__main__":
    main()
