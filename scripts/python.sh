#!/usr/bin/env bash
# Builds the Python package, installs it into the environment that `scripts/setup.sh python` makes, and tests it there, the
# examples included. Ends with 77 where there is no such environment.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${PAGEMARK_PYTHON_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/pagemark/python}
if [ ! -x "$venv/bin/maturin" ]; then
    echo "skipped: python: no environment in $venv: scripts/setup.sh python makes it" | tee -a "${PAGEMARK_SKIP_LOG:-/dev/null}"
    exit 77
fi
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
# With a build directory of its own: for a wheel, PyO3 is built with other settings than in the workspace.
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/python "$venv/bin/maturin" build --quiet --locked --profile dev \
    --manifest-path crates/pagemark-python/Cargo.toml --interpreter "$venv/bin/python" --out "$wheels"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheels"/pagemark-*.whl
cd crates/pagemark-python
PYTHONDONTWRITEBYTECODE=1 timeout 900 "$venv/bin/python" -m pytest "$@"
