#!/usr/bin/env bash
# Runs the loom models of every crate that depends on loom: unit tests with `loom` in their path (`mod loom_tests`)
# and the files tests/loom*.rs. Called by `make test-loom`.
# In a build folder of its own, because `--cfg loom` makes every crate another crate.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Bounded pre-emptions keep each model to seconds; LOOM_MAX_PREEMPTIONS=4 looks deeper.
export LOOM_MAX_PREEMPTIONS=${LOOM_MAX_PREEMPTIONS:-2} RUSTFLAGS="--cfg loom"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/loom
# A wheel's optimisation across crates takes the linker longer than it saves models of seconds.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16

run() { cargo test ${CI:+--locked} --quiet --release "$@" 2>&1; }

found=0
for manifest in $(grep -l "cfg(loom)" crates/*/Cargo.toml); do
    folder=$(dirname "$manifest")
    crate=$(basename "$folder")
    if grep -qr "cfg(all(test, loom))\|cfg(all(loom, test))" "$folder/src"; then
        run -p "$crate" --lib loom
        found=1
    fi
    for file in "$folder"/tests/loom*.rs; do
        [ -e "$file" ] || continue
        run -p "$crate" --test "$(basename "$file" .rs)"
        found=1
    done
done
[ "$found" = 1 ] || echo "no crate has loom models yet"
