#!/usr/bin/env bash
# Brings everything that Pagemark needs to be built, tested and shown onto a Debian-like machine that has only the
# language toolchains. Does nothing, quickly, where all is there.
#
#   scripts/setup.sh            everything
#   scripts/setup.sh packages   the system packages alone
#   scripts/setup.sh criu       a CRIU that is new enough, alone
#   scripts/setup.sh demo       what `make demo` needs: both of these, and a look whether Rust is there
#   scripts/setup.sh rust       the parts of the Rust toolchain, alone
#   scripts/setup.sh c          what makes the C header, alone
#   scripts/setup.sh python     an environment in which the Python package is built and tested, alone
set -euo pipefail

packages=(build-essential ca-certificates gdb iptables pkg-config python3 python3-venv redis-server redis-tools)
criu_needed=4.2
cbindgen_version=0.29.4
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pagemark

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    printf 'setup: %s\nhelp: %s\n' "$1" "$2" >&2
    exit 1
}

as_root=()
if [ "$(id -u)" != 0 ]; then as_root=(sudo); fi
root_can() {
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null || fail "$1 needs root, and there is no sudo" "run it as root"
}

# True if version $1 is at least $2.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

set_up_packages() {
    local missing=() package
    for package in "${packages[@]}"; do
        dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
    done
    if [ ${#missing[@]} = 0 ]; then return; fi
    root_can "installing ${missing[*]}"
    command -v apt-get >/dev/null || fail "no apt-get here" "install these by hand: ${missing[*]}"
    say "installing ${missing[*]}"
    "${as_root[@]}" apt-get update -q ||
        fail "apt-get update failed" "look at what it says above; the machine needs a working package source"
    # A Redis that the package starts by itself would hold the port and is not wanted.
    local policy=/usr/sbin/policy-rc.d ours=
    if [ ! -e $policy ]; then
        ours=yes
        printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee $policy >/dev/null
        "${as_root[@]}" chmod 755 $policy
    fi
    local status=0
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" || status=$?
    if [ -n "$ours" ]; then "${as_root[@]}" rm -f $policy; fi
    [ $status = 0 ] || fail "apt-get install ${missing[*]} failed" "look at what it says above, then run this again"
}

# The version that a CRIU says it has, or nothing.
criu_version() { "$1" --version 2>/dev/null | sed -n 's/^Version: *//p'; }

new_enough() {
    local version
    version=$(criu_version "$1") || return 1
    [ -n "$version" ] && at_least "$version" $criu_needed
}

# Prints the CRIU to use, in the order in which Pagemark itself looks for it.
find_criu() {
    local candidate
    for candidate in "${PAGEMARK_CRIU:-}" "$(command -v criu || true)" "$cache/criu/criu"; do
        if [ -n "$candidate" ] && [ -x "$candidate" ] && new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# The first Debian archive that this machine's own apt configuration names.
debian_archive() {
    if [ -n "${PAGEMARK_DEBIAN_ARCHIVE:-}" ]; then
        echo "$PAGEMARK_DEBIAN_ARCHIVE"
        return
    fi
    apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(LABEL)' 'Created-By: Packages' 2>/dev/null |
        awk '$2 == "Debian" && $3 == "Debian" { print $1; exit }'
}

# Debian's unstable CRIU with all its libraries, down to the C library, beside the system and not in it: unpacked
# into the cache and started through its own dynamic loader.
fetch_criu() {
    [ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] ||
        fail "no CRIU >= $criu_needed here, and the packaged one is fetched for amd64 only" \
            "build CRIU $criu_needed or later and set PAGEMARK_CRIU to it"
    local key=/usr/share/keyrings/debian-archive-keyring.gpg archive
    archive=$(debian_archive)
    if [ -z "$archive" ]; then
        # Where apt's lists were cleaned away it cannot tell whose archive a source is.
        root_can "apt-get update"
        "${as_root[@]}" apt-get update -q || true
        archive=$(debian_archive)
    fi
    [ -n "$archive" ] && [ -e $key ] ||
        fail "no CRIU >= $criu_needed here, and no Debian archive (with its keyring) is configured to fetch one from" \
            "install CRIU $criu_needed or later, or set PAGEMARK_CRIU to one, or PAGEMARK_DEBIAN_ARCHIVE to a mirror's address"
    say "fetching CRIU from Debian unstable at $archive"
    # No `local`: the trap runs when the script ends, out of this function.
    work=$cache/criu/work.$$
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$work"/{lists/partial,cache/archives/partial,etc,root,none}
    : >"$work/status"
    echo "deb [arch=amd64 signed-by=$key] $archive unstable main" >"$work/etc/sources.list"
    # An empty status file makes apt believe that nothing is installed, so every library comes along.
    cat >"$work/apt.conf" <<CONF
Dir::Etc::sourcelist "$work/etc/sources.list";
Dir::Etc::sourceparts "$work/none";
Dir::Etc::preferences "$work/none/preferences";
Dir::Etc::preferencesparts "$work/none";
Dir::State "$work";
Dir::State::lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
APT::Sandbox::User "";
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
Acquire::Languages "none";
Acquire::Retries "3";
CONF
    local log=$work/log
    {
        APT_CONFIG=$work/apt.conf apt-get update -q &&
            APT_CONFIG=$work/apt.conf apt-get install -q -y --download-only --no-install-recommends \
                -o Debug::NoLocking=1 criu
    } >"$log" 2>&1 || {
        tail -n 20 "$log" >&2
        fail "CRIU could not be fetched from $archive" \
            "see above; with no network, install CRIU $criu_needed or later and set PAGEMARK_CRIU to it (checkpoints of memory alone work without)"
    }
    local package
    for package in "$work"/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$work/root" || fail "$package could not be unpacked" "is the disk full? run this again"
    done
    write_wrapper "$work"
    new_enough "$work/criu" ||
        fail "what $archive calls unstable holds no CRIU >= $criu_needed that starts here" \
            "build CRIU $criu_needed or later and set PAGEMARK_CRIU to it"
    rm -rf "$cache/criu/root"
    mv "$work/root" "$cache/criu/root"
    write_wrapper "$cache/criu"
}

# The command that starts the CRIU which lies in directory $1. Its plugins would be another version's, and a directory
# for them that is not there makes every dump fail.
write_wrapper() {
    mkdir -p "$1/no-plugins"
    cat >"$1/criu.new" <<'WRAPPER'
#!/bin/sh
# Starts CRIU through the loader and the libraries that came with it, without plugins.
here=$(dirname "$(readlink -f "$0")")
CRIU_LIBS_DIR=$here/no-plugins
export CRIU_LIBS_DIR
exec "$here/root/usr/lib64/ld-linux-x86-64.so.2" --library-path "$here/root/usr/lib/x86_64-linux-gnu" \
    "$here/root/usr/sbin/criu" "$@"
WRAPPER
    chmod 755 "$1/criu.new"
    mv "$1/criu.new" "$1/criu"
}

set_up_criu() {
    local criu
    # Also one that an earlier version of this script has set up.
    if [ -d "$cache/criu/root" ]; then write_wrapper "$cache/criu"; fi
    if ! criu=$(find_criu); then
        fetch_criu
        criu=$(find_criu) || fail "the fetched CRIU does not start" "remove $cache/criu and run this again"
    fi
    local check
    if [ "$(id -u)" = 0 ] && ! check=$("$criu" check 2>&1); then
        printf '%s\n' "$check" >&2
        fail "$criu check: CRIU cannot work on this kernel" \
            "it needs root in the initial namespaces and CONFIG_CHECKPOINT_RESTORE; memory-only checkpoints work without"
    fi
    say "CRIU $(criu_version "$criu"): $criu"
}

need_cargo() { command -v cargo >/dev/null || fail "no cargo" "install Rust with rustup, then run this again"; }

set_up_rust() {
    need_cargo
    local component
    for component in clippy fmt; do
        if cargo $component --version >/dev/null 2>&1; then continue; fi
        command -v rustup >/dev/null ||
            fail "cargo $component is missing, and rustup to add it" "install the toolchain's $component"
        rustup component add ${component/fmt/rustfmt} || fail "rustup component add $component failed" "see above"
    done
    # Only fuzzing needs a nightly compiler: the rest goes on without.
    if ! rustup toolchain list 2>/dev/null | grep -q '^nightly'; then
        say "fetching a nightly toolchain, for fuzzing"
        rustup toolchain install nightly --profile minimal || {
            say "no nightly toolchain can be had: no fuzzing on this machine"
            return 0
        }
    fi
    if ! cargo fuzz --version >/dev/null 2>&1; then
        say "installing cargo-fuzz"
        # Not beside a build directory that the caller may have set.
        env -u CARGO_TARGET_DIR cargo install cargo-fuzz --locked --quiet ||
            say "cargo-fuzz could not be installed: no fuzzing on this machine"
    fi
}

# Only the comparison of the C header with the sources needs it: the rest goes on without.
set_up_c() {
    local root=$cache/cbindgen
    if [ "$("$root/bin/cbindgen" --version 2>/dev/null)" = "cbindgen $cbindgen_version" ]; then return; fi
    say "installing cbindgen $cbindgen_version"
    # A debug build, because it is used for a second and built for minutes.
    env -u CARGO_TARGET_DIR cargo install cbindgen --version $cbindgen_version --locked --debug --quiet --root "$root" ||
        say "cbindgen could not be installed: the C header is not compared with the sources"
}

# Only the tests of the Python package need it: the rest goes on without.
set_up_python() {
    local venv=$cache/python wanted
    wanted=$(dirname "$0")/../crates/pagemark-python/requirements.txt
    if cmp -s "$wanted" "$venv/installed"; then return; fi
    say "making a Python environment in $venv"
    rm -rf "$venv"
    if python3 -m venv "$venv" &&
        "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$wanted"; then
        cp "$wanted" "$venv/installed"
    else
        rm -rf "$venv"
        say "no Python environment can be made (Python 3.11 or later is needed): the Python package is not tested"
    fi
}

case ${1:-all} in
packages) set_up_packages ;;
criu) set_up_criu ;;
rust) set_up_rust ;;
c) set_up_c ;;
python) set_up_python ;;
demo)
    need_cargo
    set_up_packages
    set_up_criu
    ;;
all)
    set_up_packages
    set_up_criu
    set_up_rust
    set_up_c
    set_up_python
    ;;
*) fail "no such part: $1" "one of: packages, criu, demo, rust, c, python, or nothing for all" ;;
esac
