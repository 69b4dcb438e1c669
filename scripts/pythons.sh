#!/usr/bin/env bash
# Tests the Python package with each CPython that there is: python3.9 to python3.14 and python3.14t in PATH, those of pyenv
# among them.
#
#   scripts/pythons.sh [VERSION…] [-- ARGUMENT OF PYTEST…]
#
# One wheel is installed for every version from 3.11 on (abi3). The environments are kept beside that of `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/python-common.sh
requirements=crates/pagemark-python/requirements.txt
versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    versions+=("$1")
    shift
done
[ $# -eq 0 ] || shift
[ ${#versions[@]} -gt 0 ] || versions=(3.9 3.10 3.11 3.12 3.13 3.14 3.14t)
if [ ! -x "$tools/bin/pip" ]; then
    echo "skipped: pythons: no environment in $tools (make setup)"
    exit 77
fi
PAGEMARK_PYTHON_WHEELS=$(mktemp -d)
export PAGEMARK_PYTHON_WHEELS
trap 'rm -rf "$PAGEMARK_PYTHON_WHEELS"' EXIT

# Makes the environment of a version, if it is not there: environment VERSION INTERPRETER. Each command is checked, because
# the shell does not end at a failure within a condition.
environment() {
    local directory=$cache/pythons/$1 wanted
    wanted=$("$2" -c 'import sys; print(sys.version)' && cat "$requirements") || return
    if [ "$(cat "$directory/installed" 2> /dev/null)" != "$wanted" ]; then
        # Some distributions leave out what would put pip there.
        rm -rf "$directory" && "$2" -m venv --without-pip "$directory" &&
            "$tools/bin/pip" --python "$directory/bin/python" install --quiet --disable-pip-version-check \
                --requirement "$requirements" &&
            printf '%s\n' "$wanted" > "$directory/installed"
    fi
}

tested=() failed=()
for version in "${versions[@]}"; do
    if ! interpreter=$(find_python "$version"); then
        echo "skipped: pythons: no python$version in PATH"
        continue
    fi
    full=$("$interpreter" -c 'import platform; print(platform.python_version())')
    echo "== Python $full"
    tested+=("$full")
    if ! { environment "$version" "$interpreter" &&
        PAGEMARK_PYTHON_VENV=$cache/pythons/$version scripts/python.sh "$@"; }; then
        failed+=("$full")
    fi
done
[ ${#tested[@]} -gt 0 ] || exit 77
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed with Python ${failed[*]}, of ${tested[*]}"
    exit 1
fi
echo "passed with Python ${tested[*]}"
