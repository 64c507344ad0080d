#!/usr/bin/env bash
# Runs the random operations of the control plane for longer than `make test` does, from seeds of their own, as many
# tests at a time as there are processors. Called by `make test-random`.
#
#   SCALE=20 scripts/test_random.sh     so many times the seeds of an ordinary run (default: 4)
#
# A failing test prints its seed; RUSTVLLM_TEST_FIRST_SEED=seed RUSTVLLM_TEST_SEEDS=1 repeats it alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scale=${SCALE:-4}
# crate, test, seeds and operations of an ordinary run. The scheduler's seeds name their modes with their lowest five bits.
tests="scheduler random_operations 96 1200
scheduler equal_to_naive 150 400
scheduler naive_alone 100 300
kvblocks random_operations 60 2500"

# Optimised, with their assertions: they run three times as fast, for forty seconds of compiling.
optimised="--config profile.dev.package.scheduler.opt-level=1 --config profile.dev.package.kvblocks.opt-level=1"
# shellcheck disable=SC2086 # several flags
cargo $optimised test ${CI:+--locked} --quiet --no-run -p kvblocks -p scheduler

run() {
    local log status=0
    # shellcheck disable=SC2086 # several flags
    log=$(RUSTVLLM_TEST_FIRST_SEED=1000 RUSTVLLM_TEST_SEEDS=$((scale * $3)) RUSTVLLM_TEST_OPERATIONS=$4 \
        cargo $optimised test ${CI:+--locked} --quiet -p "$1" --test "$2" 2>&1) || status=$?
    printf '%s, test %s: %d seeds of %d operations\n%s\n' "$1" "$2" $((scale * $3)) "$4" "$log"
    return "$status"
}
export -f run
export scale optimised
xargs -P "$(nproc)" -L 1 bash -c 'run "$@"' run <<<"$tests"
