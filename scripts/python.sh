#!/usr/bin/env bash
# Builds the Python package, installs it into the environment that `make setup` makes, and tests it there, with the
# examples. The exit status is 77 where there is no such environment.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${PAGEMARK_PYTHON_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/pagemark/python}
if [ ! -x "$venv/bin/maturin" ]; then
    echo "skipped: python: no environment in $venv (make setup)"
    exit 77
fi
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
# For a wheel, PyO3 and what uses it are built anew, with other settings than in the workspace; the rest is shared.
"$venv/bin/maturin" build --quiet --locked --profile dev \
    --manifest-path crates/pagemark-python/Cargo.toml --interpreter "$venv/bin/python" --out "$wheels"
case $(basename "$wheels"/pagemark-*.whl) in
pagemark-*-cp311-abi3-manylinux_*.whl) ;;
# Of a free-threaded Python, where PAGEMARK_PYTHON_VENV names the environment of one.
pagemark-*-cp3*-cp3*t-manylinux_*.whl | pagemark-*-cp3*-abi3t-manylinux_*.whl) ;;
*) echo "python: this wheel does not serve all versions of Python and Linux: $(ls "$wheels")" >&2 && exit 1 ;;
esac
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheels"/pagemark-*.whl
# The tests of parallel simulation start this program. It is the one of all other tests, which run at the same time:
# another choice of packages would link it with other features, and replace it under them.
cargo test --quiet --locked --workspace --no-run
PAGEMARK_PROGRAM=$(realpath "${CARGO_TARGET_DIR:-target}/debug/pagemark")
export PAGEMARK_PROGRAM
cd crates/pagemark-python
# Other tests wait for time to pass.
PYTHONDONTWRITEBYTECODE=1 timeout 900 nice -n 10 "$venv/bin/python" -m pytest "$@"
