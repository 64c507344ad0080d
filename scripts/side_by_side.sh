#!/usr/bin/env bash
# Runs two commands at the same time: one that mostly waits, whose output is shown as it comes, and one that computes,
# with less priority, whose output is shown at the end. Fails when one of them does. Called by `make test-long`.
#
#   scripts/side_by_side.sh "make test-slow" "make test-random test-loom test-mutation"
set -uo pipefail

log=$(mktemp)
set -m # a process group for the second command, to end all of it
nice -n 5 bash -c "$2" >"$log" 2>&1 </dev/null &
behind=$!
set +m
trap 'kill -- -"$behind" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM

status=0
bash -c "$1" || status=1
wait "$behind" || status=1
printf -- '--- %s\n' "$2"
cat "$log"
exit "$status"
