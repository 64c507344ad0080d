#!/usr/bin/env bash
# Runs the loom models: every crate that has tests/loom*.rs. Called by `make test-loom`.
# A folder of its own, because `--cfg loom` makes every crate another crate.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=()
for file in crates/*/tests/loom*.rs; do
    [ -e "$file" ] || continue
    crate=${file#crates/}
    packages+=(-p "${crate%%/*}" --test "$(basename "$file" .rs)")
done
if [ ${#packages[@]} -eq 0 ]; then
    echo "no crate has loom models"
    exit 0
fi
# Bounded pre-emptions keep each model to seconds; LOOM_MAX_PREEMPTIONS=4 looks deeper.
LOOM_MAX_PREEMPTIONS=${LOOM_MAX_PREEMPTIONS:-2} RUSTFLAGS="--cfg loom" \
    CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/loom cargo test ${CI:+--locked} --quiet --release "${packages[@]}"
