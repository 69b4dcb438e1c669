#!/usr/bin/env bash
# All that has to hold before a change is good, and a summary at the end.
#
# PAGEMARK_FUZZ_SECONDS=0 leaves the fuzzing out, PAGEMARK_LAB=0 what runs on other kernels, outside CI. With CI=true nothing may be
# skipped but what scripts/ci-skips.txt allows.
set -uo pipefail
cd "$(dirname "$0")/.."
ci=${CI:-false}
fuzz_seconds=${PAGEMARK_FUZZ_SECONDS:-60}

scripts/setup.sh || exit 1

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export PAGEMARK_SKIP_LOG=$logs/skips
: >"$PAGEMARK_SKIP_LOG"
failed_steps=()

# step NAME COMMAND…: runs it, and goes on after a failure so that the summary names all of them.
step() {
    local name=$1 status
    shift
    printf '\n== %s\n' "$name"
    "$@"
    status=$?
    if [ $status = 77 ]; then return; fi
    if [ $status != 0 ]; then failed_steps+=("$name"); fi
}

# Tests talk a lot: what counts goes to the terminal, everything to the log.
tests() {
    cargo test --workspace --locked --no-fail-fast -- --show-output >"$logs/tests" 2>&1
    local status=$?
    grep -aE '^ +(Running|Doc-tests) |^test result:|^test .* FAILED$|^(error|warning)' "$logs/tests"
    if [ $status != 0 ]; then
        # libtest tells of failures at the end of each binary, behind the output of what passed.
        awk '/^failures:$/ { show = 1 } /^test result:/ { show = 0 } /^error(\[|:)/ { errors = 12 }
             show || errors-- > 0' "$logs/tests"
    fi
    return $status
}

models() {
    scripts/models.sh >"$logs/models" 2>&1
    local status=$?
    if [ $status = 0 ]; then grep -a '^test result:' "$logs/models"; else tail -n 60 "$logs/models"; fi
    return $status
}

fuzz() {
    if [ "$fuzz_seconds" = 0 ]; then
        echo "skipped: fuzz: PAGEMARK_FUZZ_SECONDS=0" >>"$PAGEMARK_SKIP_LOG"
        return 77
    fi
    scripts/fuzz.sh "$fuzz_seconds" >"$logs/fuzz" 2>&1
    local status=$?
    grep -a '^skipped: ' "$logs/fuzz" >>"$PAGEMARK_SKIP_LOG"
    if [ $status = 0 ]; then grep -aE '^(stat::number_of_executed_units|Done)' "$logs/fuzz"; else tail -n 40 "$logs/fuzz"; fi
    return $status
}

python() {
    scripts/python.sh >"$logs/python" 2>&1
    local status=$?
    if [ $status = 0 ] || [ $status = 77 ]; then tail -n 1 "$logs/python"; else cat "$logs/python"; fi
    return $status
}

# On kernels that this machine does not run. Their first build takes some twenty minutes; then they are in the lab's cache.
lab() {
    local reason=
    if [ "${PAGEMARK_LAB:-1}" = 0 ]; then reason="PAGEMARK_LAB=0"; fi
    if [ "$(uname -m)" != x86_64 ]; then reason="the lab needs an x86-64 machine"; fi
    if [ "$(id -u)" != 0 ]; then reason="the lab needs root"; fi
    if [ -n "$reason" ]; then
        echo "skipped: lab: $reason" >>"$PAGEMARK_SKIP_LOG"
        return 77
    fi
    scripts/lab-test.sh quick >"$logs/lab" 2>&1
    local status=$?
    if [ $status != 0 ]; then grep -av '^test .* ok$' "$logs/lab" | tail -n 150; else sed -n '/^== all/,$p' "$logs/lab"; fi
    return $status
}

step "format" cargo fmt --all --check
step "clippy" cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
step "documentation" env RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --no-deps --locked --quiet
step "licences" scripts/licences.py
step "tests" tests
step "models" models
step "python" python
step "fuzz" fuzz
step "lab" lab

# A skipped test says so through the log or on its output; an ignored one is libtest's own way.
{
    cat "$PAGEMARK_SKIP_LOG"
    grep -aE '^skipped: ' "$logs/tests"
    sed -nE 's/^test (.*) \.\.\. ignored(, (.*))?$/skipped: \1: ignored \3/p' "$logs/tests"
} 2>/dev/null | sort -u >"$logs/all-skips"

read -r passed failed < <(awk '/^test result:/ { passed += $4; failed += $6 } END { print passed + 0, failed + 0 }' "$logs/tests")
printf '\n== summary\n%s tests passed, %s failed, %s skipped\n' "$passed" "$failed" "$(wc -l <"$logs/all-skips")"
cat "$logs/all-skips"

bad=0
if [ ${#failed_steps[@]} != 0 ]; then
    printf 'failed: %s\n' "${failed_steps[@]}"
    bad=1
fi
if [ "$passed" = 0 ]; then
    echo "failed: no test ran"
    bad=1
fi
if [ "$ci" = true ]; then
    grep -vE '^(#|$)' scripts/ci-skips.txt >"$logs/allowed"
    if grep -vEf "$logs/allowed" "$logs/all-skips" >"$logs/unwanted"; then
        echo "failed: CI is meant to have what these were skipped for:"
        cat "$logs/unwanted"
        bad=1
    fi
fi
if [ $bad = 0 ]; then echo "all good"; fi
exit $bad
