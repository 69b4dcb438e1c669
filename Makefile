# `make demo` and `make test` do everything that they need, set-up included.

.DEFAULT_GOAL := build
.PHONY: setup setup-demo criu build demo test fmt clippy doc licences models miri sanitize fuzz bench lab header install-c clean

FUZZ_SECONDS ?= 60

setup: ; @scripts/setup.sh

criu: ; @scripts/setup.sh criu

build: ; cargo build --release --locked

# Only what it needs: no nightly compiler, no fuzzer.
demo: setup-demo build ; @scripts/demo.sh

setup-demo: ; @scripts/setup.sh demo

# Everything below, then all tests, and a summary that says what was skipped and why.
test: ; @scripts/test.sh

fmt: ; cargo fmt --all --check

clippy: ; cargo clippy --workspace --all-targets --locked -- -D warnings

doc: ; RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --no-deps --locked

licences: ; @scripts/licences.py

# What threads share without locks, in every order that loom tries.
models: ; @scripts/models.sh

# What can be run under Miri, and regions and snapshots under the sanitizers for addresses and threads; slow, so not part of `make test`.
miri: ; @scripts/miri.sh

sanitize: ; @scripts/sanitize.sh address thread

fuzz: ; @scripts/fuzz.sh $(FUZZ_SECONDS)

bench: build ; $${CARGO_TARGET_DIR:-target}/release/pagemark bench process

# The C header, from the sources.
header: ; @scripts/setup.sh c && scripts/header.sh

# The C library, its header and its pkg-config file: make install-c PREFIX=/usr/local
PREFIX ?= /usr/local
install-c: ; cargo build --release --locked -p pagemark-c && scripts/install-c.sh $(PREFIX)

# The kernels of the lab, fetched and built; what to do with them says lab/lab.
lab: ; @lab/lab setup && lab/lab build ldt && lab/lab build plain && lab/lab build stock

clean: ; cargo clean
