# `make demo`, `make test` and `make test-full` install everything that they need; this needs root, or sudo.

.DEFAULT_GOAL := build
.PHONY: setup setup-demo criu build demo check test test-full fmt clippy doc licences models miri sanitize fuzz bench lab \
	book header install-c wheel pythons semver clean

# For each fuzz target.
FUZZ_SECONDS ?= 60

setup: ; @scripts/suite setup

criu: ; @scripts/suite setup criu

# What a user installs. Tests, benchmarks, the packages for C and Python are built with --workspace.
build: ; cargo build --release --locked

# Without the nightly compiler and the tools that only tests need.
demo: setup-demo build ; @scripts/demo.sh

setup-demo: ; @scripts/suite setup demo

# Format, lints and unit tests. No root; no network once everything is built.
check: ; @scripts/suite check

# The tests of every change, as root, and a summary that says what was skipped and why, and how long each part took.
test: ; @scripts/suite test

# Also what takes longer: all kernels of the lab, PostgreSQL, CRIU's tests, Miri, sanitizers, long fuzzing, ten times the cases
# of each property.
test-full: ; @scripts/suite test-full

fmt: ; cargo fmt --all --check

clippy: ; cargo clippy --workspace --all-targets --locked -- -D warnings && cargo clippy -p pagemark-c --locked -- -D warnings

doc: ; RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --no-deps --locked

licences: ; @scripts/licences.py

# The documents as a book with a search, in the directory `book`, with its links checked.
book: ; @scripts/suite setup book && scripts/book.py

# What threads share without locks, in every order that loom tries.
models: ; @scripts/models.sh

# The modules that Miri can run.
miri: ; @scripts/miri.sh

# Regions and snapshots under the sanitizers for addresses and threads.
sanitize: ; @scripts/sanitize.sh address thread

fuzz: ; @scripts/fuzz.sh $(FUZZ_SECONDS)

bench: build ; cargo build --release --locked -p pagemark-bench && $${CARGO_TARGET_DIR:-target}/release/pagemark-bench process

# The C header, from the sources.
header: ; @scripts/suite setup c && scripts/header.sh

# The C library, its header and its pkg-config file: make install-c PREFIX=/usr/local
PREFIX ?= /usr/local
install-c: ; cargo build --release --locked -p pagemark-c && scripts/install-c.sh $(PREFIX)

# The wheels of the Python package in target/wheels: for every CPython from 3.11 on, and for 3.9, 3.10 and each free-threaded
# one in PATH.
wheel: ; @scripts/suite setup python && scripts/wheel.sh

# The Python package with each CPython from 3.9 to 3.14 in PATH.
pythons: ; @scripts/suite setup python && scripts/pythons.sh

# The interfaces of the libraries, compared with those of the last release.
semver: ; @scripts/suite setup semver && scripts/semver.sh

# The kernels of the lab, fetched and built, as root. `lab/lab help` says how to use them.
lab: ; @lab/lab setup ldt plain stock

clean: ; cargo clean
