#!/usr/bin/env bash
# Brings a clone to the point where `.venv/bin/rustvllm` runs: checks the machine, makes `.venv`, installs the
# dependencies, builds the Rust core. Every step is skipped when its inputs have not changed, so a warm run costs
# a fraction of a second.
#
#   PYTHON=python3.12 scripts/setup.sh    use this interpreter for a new .venv
#   VENV=path scripts/setup.sh            put the environment elsewhere (default: .venv)
#
# torch is several gigabytes, so it is never installed twice: an interpreter that already has one in range lends it
# to .venv; otherwise uv links it from its cache, which every clone on the machine shares.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
stamps=$venv/.stamps
case $venv in /*) venv_abs=$venv ;; *) venv_abs=$PWD/$venv ;; esac

say() { printf '[setup] %s\n' "$*" >&2; }
warn() { printf '[setup] warning: %s\n' "$*" >&2; }
die() {
    printf '[setup] cannot continue: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '        %s\n' "$line" >&2; done
    exit 1
}

# at_least 1.95.0 1.88: is the first dotted version no older than the second?
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

check_platform() {
    local system machine
    system=$(uname -s)
    machine=$(uname -m)
    [ "$system" = Linux ] || die "rustvllm runs on Linux; this is $system." \
        "Use a Linux machine, a container or WSL 2."
    if [ "$machine" != x86_64 ]; then
        warn "this is $machine; only x86-64 is tested. Portable code paths are used."
    elif ! grep -qw avx2 /proc/cpuinfo; then
        warn "this processor has no AVX2. Everything works, on slower portable code paths."
    fi
}

# What an environment takes (6.2 GB with torch and its CUDA libraries), what it takes where torch is lent, and what the
# core's build takes (0.6 GB), each with some room.
WHOLE_MB=8000
LENT_MB=2000
CORE_MB=1000

enough_disk() {
    scripts/disk_space.sh "$1" "$2" || exit 1
}

check_rust() {
    local wanted found
    wanted=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
    command -v cargo >/dev/null && command -v rustc >/dev/null || die \
        "no Rust toolchain found (cargo and rustc are not both on PATH); $wanted or newer is needed." \
        "Install one from https://rustup.rs, or: apt-get install rustup && rustup default stable"
    found=$(rustc --version | cut -d ' ' -f 2)
    at_least "$found" "$wanted" || die "rustc $found is too old; $wanted or newer is needed." "Try: rustup update stable"
}

check_c_compiler() {
    command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || die \
        "no C compiler found (cc, gcc or clang); Rust needs one to link." "Try: apt-get install build-essential"
}

# Sets $python to an interpreter of 3.11 or newer that can make virtual environments.
find_python() {
    local candidate tried=""
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        command -v "$candidate" >/dev/null || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            "$python" -c 'import ensurepip, venv' 2>/dev/null || die \
                "$python cannot make virtual environments (module venv or ensurepip is missing)." \
                "Try: apt-get install python3-venv"
            return
        fi
        tried="$tried $candidate ($("$candidate" --version 2>&1 || true))"
    done
    die "no Python 3.11 or newer found. Tried:${tried:- ${PYTHON:-python3, python3.11 to python3.14}}." \
        "Install one (apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3.12"
}

# The torch version an interpreter has, when it is in the range that pyproject.toml asks for; nothing otherwise.
torch_in_range() {
    "$1" - <<'PY' 2>/dev/null || true
import importlib.metadata, tomllib
from pip._vendor.packaging.requirements import Requirement
wanted = [Requirement(r) for r in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]]
torch = next(r for r in wanted if r.name == "torch")
found = importlib.metadata.version("torch")
if torch.specifier.contains(found, prereleases=True):
    print(found)
PY
}

make_venv() {
    local found
    if [ -x "$venv/bin/python" ]; then
        "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
        die "$venv does not hold a working Python 3.11 or newer." "Remove it and run make again: rm -r $venv"
    fi
    find_python
    found=$(torch_in_range "$python")
    enough_disk "$([ -n "$found" ] && echo "$LENT_MB" || echo "$WHOLE_MB")" "the environment $venv"
    if [ -n "$found" ]; then
        say "making $venv with the torch $found of $(command -v "$python")"
        "$python" -m venv --system-site-packages "$venv"
        # From inside another virtual environment --system-site-packages means its base: lend the environment itself.
        "$python" - "$venv_abs" <<'PY'
import pathlib, subprocess, sys, sysconfig
if sys.prefix != sys.base_prefix:
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    ours = subprocess.run([f"{sys.argv[1]}/bin/python", "-c", ask], check=True, capture_output=True, text=True)
    lent = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    pathlib.Path(ours.stdout.strip(), "lent_packages.pth").write_text("\n".join(lent) + "\n")
PY
    else
        say "making $venv with $("$python" --version)"
        "$python" -m venv "$venv"
    fi
}

# What the environment must hold: build requirements, dependencies and the dev extra, one per line.
requirements() {
    "$venv/bin/python" - <<'PY'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"]
def expand(name):
    for line in extras[name]:
        own = re.fullmatch(r"rustvllm\[([\w,-]+)\]", line)
        if own:
            for extra in own[1].split(","):
                yield from expand(extra)
        else:
            yield line
print("\n".join(dict.fromkeys([*project["build-system"]["requires"], *project["project"]["dependencies"], *expand("dev")])))
PY
}

install_requirements() {
    local wanted
    wanted=$(requirements)
    [ "$(cat "$stamps/requirements" 2>/dev/null)" != "$wanted" ] || [ ! -x "$venv/bin/maturin" ] || return 0
    printf '%s\n' "$wanted" >"$venv/requirements.txt"
    if grep -q '^include-system-site-packages = true' "$venv/pyvenv.cfg"; then
        say "installing the dependencies that are not lent"
        # uv does not see packages lent from outside the environment; pip does.
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$venv/requirements.txt"
        # A lent package brings no command into .venv/bin: the tools called from there are installed in any case.
        grep -E '^(maturin|ruff|mypy|import-linter)\b' "$venv/requirements.txt" \
            | xargs "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --ignore-installed --no-deps
    else
        find_uv
        say "installing the dependencies (torch with CUDA is several GB the first time on a machine)"
        UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300} "$uv" pip install --python "$venv/bin/python" -r "$venv/requirements.txt"
    fi
    mkdir -p "$stamps"
    printf '%s\n' "$wanted" >"$stamps/requirements"
}

find_uv() {
    if command -v uv >/dev/null; then
        uv=uv
    else
        uv=$venv/bin/uv
        [ -x "$uv" ] || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
    fi
}

# A digest of everything the compiled core is made from, this checkout's place included: an editable install points at it.
core_inputs() {
    {
        pwd
        rustc -vV
        "$venv/bin/python" -VV
        find Cargo.toml Cargo.lock pyproject.toml crates -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.lock' \) \
            -print0 | sort -z | xargs -0 sha256sum
    } | sha256sum
}

build_core() {
    local inputs
    inputs=$(core_inputs)
    if [ "$(cat "$stamps/core" 2>/dev/null)" = "$inputs" ] && compgen -G 'python/rustvllm/_core*.so' >/dev/null \
        && [ -x "$venv/bin/rustvllm" ]; then
        return 0
    fi
    enough_disk "$CORE_MB" "building the Rust core"
    say "building the Rust core (release)"
    # CI builds the committed lock file; at home cargo may bring it up to date with an edited Cargo.toml.
    VIRTUAL_ENV=$venv_abs PATH=$venv_abs/bin:$PATH PIP_QUIET=1 "$venv/bin/maturin" develop --release ${CI:+--locked} --quiet
    mkdir -p "$stamps"
    printf '%s\n' "$inputs" >"$stamps/core"
}

check_platform
check_rust
check_c_compiler
make_venv
exec 9>"$venv/.setup.lock" # two terminals may run make at once
flock 9
install_requirements
build_core
