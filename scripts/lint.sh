#!/usr/bin/env bash
# Every static check, each run even when another failed, so that one run shows all there is to mend. Called by `make lint`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${VENV:-.venv}/bin

for component in fmt clippy; do
    cargo "$component" --version >/dev/null 2>&1 || {
        echo "cargo $component is missing. Try: rustup component add rustfmt clippy" >&2
        exit 1
    }
done

failed=()
check() {
    local name=$1
    shift
    echo "--- $name"
    "$@" || failed+=("$name: $*")
}

check "Python lints" "$bin/ruff" check .
check "Python format" "$bin/ruff" format --check --quiet .
check "Python types" "$bin/mypy"
check "stub of the core" "$bin/python" -m mypy.stubtest rustvllm._core --mypy-config-file pyproject.toml
check "import layers" "$bin/lint-imports"
check "Rust format" cargo fmt --all --check
check "Rust lints" cargo clippy ${CI:+--locked} --quiet --workspace --all-targets -- -D warnings
check "shell scripts" bash -n scripts/setup.sh scripts/client_environments.sh scripts/lint.sh scripts/test_loom.sh .ci/run
if command -v shellcheck >/dev/null; then
    check "shell lints" shellcheck scripts/*.sh .ci/run
fi
if command -v cargo-deny >/dev/null; then
    check "Rust dependencies" cargo deny ${CI:+--locked} check
fi # otherwise tests/architecture/test_dependencies.py holds the same deny.toml

if [ ${#failed[@]} -gt 0 ]; then
    echo
    printf 'FAILED  %s\n' "${failed[@]}"
    exit 1
fi
echo "all lints passed"
