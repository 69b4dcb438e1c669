#!/usr/bin/env bash
# Builds the Python package, installs it into the environment that `make setup` makes, and tests it there, with the
# examples. The exit status is 77 where there is no such environment.
#
# PAGEMARK_PYTHON_VENV names another environment, PAGEMARK_PYTHON_WHEELS a directory with wheels that need not be built;
# those that are built are put there.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/python-common.sh
venv=${PAGEMARK_PYTHON_VENV:-$tools}
for environment in "$tools" "$venv"; do
    if [ ! -x "$environment/bin/python" ]; then
        echo "skipped: python: no environment in $environment (make setup)"
        exit 77
    fi
done
wheels=${PAGEMARK_PYTHON_WHEELS:-}
if [ -z "$wheels" ]; then
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
fi
tag=$(wheel_tag "$venv/bin/python")
if ! compgen -G "$wheels/pagemark-*-$tag-manylinux_*.whl" > /dev/null; then
    # For a wheel, PyO3 and what uses it are built anew, with other settings than in the workspace; the rest is shared.
    build_wheel "$venv/bin/python" "$wheels" --quiet --profile dev
fi
if ! compgen -G "$wheels/pagemark-*-$tag-manylinux_*.whl" > /dev/null; then
    echo "python: no wheel for $tag and all versions of Linux: $(ls "$wheels")" >&2
    exit 1
fi
"$tools/bin/pip" --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-deps --force-reinstall \
    "$wheels"/pagemark-*-"$tag"-manylinux_*.whl
# The tests of parallel simulation start this program. It is the one of all other tests, which run at the same time:
# another choice of packages would link it with other features, and replace it under them.
cargo test --quiet --locked --workspace --no-run
PAGEMARK_PROGRAM=$(realpath "${CARGO_TARGET_DIR:-target}/debug/pagemark")
export PAGEMARK_PROGRAM
cd crates/pagemark-python
# Other tests wait for time to pass. A line for each test says which one ran when a file was made that is left.
PYTHONDONTWRITEBYTECODE=1 timeout --signal INT --kill-after 60 3600 nice -n 10 "$venv/bin/python" -m pytest --verbose "$@"
