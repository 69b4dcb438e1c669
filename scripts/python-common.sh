# What the scripts of the Python package share. They source it, with the root of the source tree as the working directory.
# shellcheck shell=bash

cache=${XDG_CACHE_HOME:-$HOME/.cache}/pagemark
# The environment that `make setup` makes, with maturin and pip.
tools=$cache/python

# Prints the path of a Python in PATH, or fails if there is none: find_python VERSION.
find_python() {
    # The variable is for pyenv, whose python3.N only works if it chooses that version.
    PYENV_VERSION=$1 "python$1" -c 'import sys; print(sys.executable)' 2> /dev/null
}

# Prints the tag of the wheel that serves a Python: wheel_tag INTERPRETER.
wheel_tag() {
    "$1" scripts/wheel_tag.py
}

# Builds the wheel that serves a Python: build_wheel INTERPRETER DIRECTORY [ARGUMENT OF MATURIN…].
build_wheel() {
    local interpreter=$1 directory=$2 tag features=()
    shift 2
    tag=$(wheel_tag "$interpreter") || return
    if [ "$tag" = cp311-abi3 ]; then
        features=(--features abi3)
    fi
    "$tools/bin/maturin" build --locked "${features[@]}" "$@" --manifest-path crates/pagemark-python/Cargo.toml \
        --interpreter "$interpreter" --out "$directory"
}
