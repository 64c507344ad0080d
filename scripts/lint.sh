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

# Clippy takes as long as all others together and leaves a processor idle for much of it: it runs together with them.
clippy=(cargo clippy ${CI:+--locked} --quiet --workspace --all-targets -- -D warnings)
clippy_log=$(mktemp)
trap 'kill "$clippy_process" 2>/dev/null; rm -f "$clippy_log"' EXIT
"${clippy[@]}" >"$clippy_log" 2>&1 &
clippy_process=$!
end_of_clippy() {
    local status=0
    wait "$clippy_process" || status=$?
    cat "$clippy_log"
    return "$status"
}

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
check "stub of the core" "$bin/python" -m mypy.stubtest rustvllm._core --mypy-config-file pyproject.toml \
    --allowlist scripts/stubtest_allowlist.txt
check "docstrings" "$bin/python" scripts/docstrings.py
check "import layers" "$bin/lint-imports"
check "Rust format" cargo fmt --all --check
for script in scripts/*.sh .ci/run; do # bash reads only the first of several
    check "shell script $script" bash -n "$script"
done
if command -v shellcheck >/dev/null; then
    check "shell lints" shellcheck scripts/*.sh .ci/run
fi
if command -v cargo-deny >/dev/null; then
    check "Rust dependencies" cargo deny ${CI:+--locked} check
fi # otherwise tests/architecture/test_dependencies.py holds the same deny.toml

echo "--- Rust lints"
end_of_clippy || failed+=("Rust lints: ${clippy[*]}")
# After clippy, which holds cargo's lock. The pages are read with private items, so links to those are good ones.
check "Rust docs" env RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" \
    cargo doc ${CI:+--locked} --quiet --workspace --no-deps --document-private-items

if [ ${#failed[@]} -gt 0 ]; then
    echo
    printf 'FAILED  %s\n' "${failed[@]}"
    exit 1
fi
echo "all lints passed"
