#!/usr/bin/env bash
# Compares the interfaces of the published libraries with those at the revision in scripts/semver-baseline, by
# cargo-semver-checks. Fails if a program that compiled with them may not compile any more, unless the version says so. The
# exit status is 77 where there is no such tool.
#
# PAGEMARK_SEMVER_SOURCE names another source tree to compare, for the test of this script.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pagemark/semver
checker=$cache/bin/cargo-semver-checks
libraries=(pagemark pagemark-heap pagemark-process pagemark-vm pagemark-explore)
if [ ! -x "$checker" ]; then
    echo "skipped: semver: no cargo-semver-checks in $cache (make semver builds it)"
    exit 77
fi
baseline=$(grep -v '^#' scripts/semver-baseline)
if [ "$(git rev-parse --is-shallow-repository 2> /dev/null || echo none)" != false ]; then
    echo "skipped: semver: the history of the sources is not here"
    exit 77
fi
if ! git cat-file -e "$baseline^{commit}" 2> /dev/null; then
    echo "semver: the baseline $baseline is not in this repository" >&2
    echo "help: fetch the whole history, or change scripts/semver-baseline" >&2
    exit 1
fi
# Sources that have passed are not examined again. Tests and benchmarks have no part in an interface.
source=${PAGEMARK_SEMVER_SOURCE:-.}
sources=$(cd "$source" && find Cargo.toml Cargo.lock crates -path '*/tests' -prune -o -type f \
    \( -name '*.rs' -o -name '*.proto' -o -name Cargo.toml -o -name Cargo.lock \) -print0 | sort -z | xargs -0 sha256sum)
passed=$cache/passed-$(cat <(echo "$baseline $sources") <(rustc -vV) <("$checker" --version) "$0" | sha256sum | cut -c 1-16)
if [ -e "$passed" ]; then
    echo "${#libraries[@]} libraries are compatible with ${baseline:0:7}; these sources were compared before"
    exit 0
fi
build=$(realpath -m "${CARGO_TARGET_DIR:-target}")/semver
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Writes the interface of each library in a source tree: describe SOURCE DIRECTORY
describe() {
    local library target=$build
    for library in "${libraries[@]}"; do
        # The variable has the stable compiler accept an unstable format. What else it changes is why the build directory is
        # not that of the workspace. Both trees share the dependencies.
        RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$target cargo rustdoc --quiet --locked --manifest-path "$1/Cargo.toml" \
            --package "$library" --lib -- -Z unstable-options --output-format json --document-hidden-items --cap-lints allow
        cp "$target/doc/${library//-/_}.json" "$2/$library.json"
    done
}

described=$cache/$(cat <(echo "$baseline") <(rustc -vV) "$0" | sha256sum | cut -c 1-16)
if [ ! -d "$described" ]; then
    mkdir "$work/source" "$work/baseline"
    git archive "$baseline" | tar -x -C "$work/source"
    describe "$work/source" "$work/baseline"
    mv -T "$work/baseline" "$described.$$" && mv -T "$described.$$" "$described"
fi
mkdir "$work/now"
describe "$source" "$work/now"
failed=()
for library in "${libraries[@]}"; do
    versions=$(grep -h -o '"crate_version":"[^"]*"' "$described/$library.json" "$work/now/$library.json" | sort -u | wc -l)
    # Without a new version there may be additions, and nothing else.
    kind=()
    [ "$versions" -gt 1 ] || kind=(--release-type minor)
    "$checker" semver-checks --baseline-rustdoc "$described/$library.json" --current-rustdoc "$work/now/$library.json" \
        "${kind[@]}" || failed+=("$library")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "semver: incompatible changes in ${failed[*]}"
    echo "help: keep what programs use, or raise the version (CONTRIBUTING.md)"
    exit 1
fi
touch "$passed"
echo "${#libraries[@]} libraries are compatible with $(git rev-parse --short "$baseline")"
