#!/usr/bin/env bash
# Refuses what the disk has no room for, before it begins: a full disk ends it half way, with an error of whatever wrote last.
#
#   scripts/disk_space.sh NEEDED_MB WHAT [FOLDER]    exit status 1 where FOLDER (default: this clone) has less
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

needed=$1 what=$2 folder=${3:-.}
available=$(df --output=avail -BM "$folder" | tail -n 1)
available=${available//[^0-9]/}
[ "$available" -lt "$needed" ] || exit 0
printf '%s needs %d MB of free disk space, but %s has %d MB.\n' "$what" "$needed" "$(cd "$folder" && pwd)" "$available" >&2
printf 'Free some (cargo clean; rm -r .venv; uv cache prune), or clone to another disk.\n' >&2
exit 1
