#!/usr/bin/env bash
# Makes the environments of the client programs that tests/clients runs against the server: `$VENV/clients/NAME` for each
# tests/clients/environments/NAME.txt. They are environments of their own because these programs ask for other versions
# of what the server uses. An environment whose file has not changed is left alone; without the network the tests are
# skipped, except in CI, where this fails.
#
#   VENV=path scripts/client_environments.sh        the environment of the server and its tests (default: .venv)
#   RUSTVLLM_TEST_CLIENTS=path                      put them there instead
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
clients=${RUSTVLLM_TEST_CLIENTS:-$venv/clients}

say() { printf '[clients] %s\n' "$*" >&2; }

find_uv() {
    if command -v uv >/dev/null; then
        uv=uv
    else
        uv=$venv/bin/uv
        [ -x "$uv" ] || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
    fi
}

# A line `# borrows: torch …` names packages, several gigabytes large, that come from the environment of the server.
borrowed() { sed -n 's/^# borrows: //p' "$1"; }

# Each step names its failure: `set -e` does not hold inside a condition.
make_environment() {
    local file=$1 folder=$2 package
    rm -rf "$folder"
    "$uv" venv --quiet --python "$venv/bin/python" "$folder" || return 1
    for package in $(borrowed "$file"); do
        printf '%s; sys_platform == "never"\n' "$package"
    done >"$folder/not_installed.txt"
    VIRTUAL_ENV=$folder UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-120} \
        "$uv" pip install --quiet --override "$folder/not_installed.txt" -r "$file" || return 1
    [ -n "$(borrowed "$file")" ] || return 0
    "$venv/bin/python" - "$folder" <<'PY'
import pathlib, subprocess, sys
ask = [f"{sys.argv[1]}/bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
own = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
# The folders of installed packages alone: an editable install of the source tree stays out of sight.
lent = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
pathlib.Path(own, "borrowed_packages.pth").write_text("\n".join(lent) + "\n")
PY
}

[ -x "$venv/bin/python" ] || { say "there is no $venv; run make setup first"; exit 1; }
mkdir -p "$clients"
exec 9>"$clients/.lock" # two terminals may run make at once
flock 9
uv=
for file in tests/clients/environments/*.txt; do
    name=$(basename "$file" .txt)
    folder=$clients/$name
    wanted=$("$venv/bin/python" -VV; cat "$file")
    [ "$(cat "$folder/made_of" 2>/dev/null)" != "$wanted" ] || continue
    [ -n "$uv" ] || find_uv
    say "installing $(grep -v '^#' "$file" | tr '\n' ' ')into $folder"
    if make_environment "$file" "$folder"; then
        printf '%s\n' "$wanted" >"$folder/made_of"
    else
        rm -rf "$folder"
        say "$name could not be installed: its tests are skipped"
        [ -z "${CI:-}" ] || exit 1
    fi
done
