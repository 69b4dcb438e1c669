#!/usr/bin/env bash
# A Redis server with 1 GiB of data is checkpointed under load, killed, and restored; every key is compared.
# `make demo` first builds what the demonstration needs. It needs root, and takes about two minutes.
#
#   MIB=256 scripts/demo.sh     with less data
#   PORT=7000 scripts/demo.sh   on another port
set -euo pipefail
cd "$(dirname "$0")/.."

pagemark=${PAGEMARK:-${CARGO_TARGET_DIR:-target}/release/pagemark}
port=${PORT:-6390}
mib=${MIB:-1024}
work=$(mktemp -d "${TMPDIR:-/tmp}/pagemark-demo.XXXXXX")
export PAGEMARK_REPO=$work/repository
load=(python3 scripts/demo_load.py --port "$port" --mib "$mib")
log=$work/pagemark.log
# Processes to end when this script ends.
runner= redis= loader=

bold= dim= plain=
if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'; fi
step() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
command_line() { printf '%s$ %s%s\n' "$dim" "$*" "$plain"; }
fail() {
    printf 'demo: %s\n' "$1" >&2
    [ -z "${2:-}" ] || printf 'help: %s\n' "$2" >&2
    if [ -s "$log" ]; then tail -n 5 "$log" >&2; fi
    exit 1
}
cleanup() {
    local status=$? pid
    for pid in $loader $runner $redis; do kill -9 "$pid" 2>/dev/null || true; done
    rm -rf "$work"
    exit $status
}
trap cleanup EXIT
trap 'exit 130' INT TERM

ask() { redis-cli -p "$port" "$@"; }
wait_for_redis() {
    local tries
    for tries in $(seq 100); do
        if [ "$(ask ping 2>/dev/null)" = PONG ]; then return; fi
        sleep 0.1
    done
    fail "redis does not answer on port $port"
}
start_load() {
    "${load[@]}" run &
    loader=$!
}
stop_load() {
    kill -TERM $loader 2>/dev/null || true
    wait $loader || fail "the load met an error: see above"
    loader=
}
# The number and the time of the newest checkpoint; 0 0 before the first.
newest() {
    "$pagemark" log --json 2>/dev/null |
        python3 -c 'import json,sys; jobs=json.load(sys.stdin); print(*[jobs[0][k] for k in ("newest","newest_taken_unix_us")] if jobs else (0, 0))' \
        2>/dev/null || echo 0 0
}
# Waits for a checkpoint that was taken after $1, in microseconds since 1970, and prints its number.
checkpoint_after() {
    local tries number taken
    for tries in $(seq 300); do
        read -r number taken < <(newest)
        if [ "$taken" -gt "$1" ]; then
            echo "$number"
            return
        fi
        sleep 0.2
    done
    fail "no checkpoint was taken for a minute"
}
now_us() { date +%s%6N; }

[ -x "$pagemark" ] || fail "$pagemark is not built" "make demo builds it"
[ "$(id -u)" = 0 ] || fail "CRIU needs root to save and restore a process" "sudo make demo"
for tool in redis-server redis-cli python3; do
    command -v $tool >/dev/null || fail "$tool is not installed" "make setup installs it"
done
if ask ping >/dev/null 2>&1; then fail "something listens on port $port already" "PORT=7000 make demo"; fi

step "1. Start Redis under Pagemark, with a checkpoint every second"
command_line "pagemark run --every 1s -- redis-server --port $port …"
"$pagemark" run --every 1s --job redis -- redis-server --port "$port" --bind 127.0.0.1 --save '' --appendonly no \
    --enable-debug-command local --logfile /dev/null </dev/null >/dev/null 2> >(exec cat >"$log") &
runner=$!
wait_for_redis
redis=$(ask info server | tr -d '\r' | sed -n 's/^process_id://p')
echo "redis is process $redis, an ordinary redis-server; pagemark is process $runner"

step "2. Fill it with $mib MiB, and keep reading and writing"
"${load[@]}" fill
ask info memory | tr -d '\r' | sed -n 's/^used_memory_human:/memory used by redis: /p'
start_load
begin=$(now_us)
# The checkpoint during which the database was filled copies much; later checkpoints copy only what the load writes.
checkpoint_after "$begin" >/dev/null
sleep 10
command_line "pagemark log redis | tail"
"$pagemark" log redis | sed -n 1p
"$pagemark" log redis | tail -n 6

step "3. Stop writing for a moment, to know exactly what is there at a checkpoint"
stop_load
keys=$(ask dbsize)
digest=$(ask debug digest)
marked=$(checkpoint_after "$(now_us)")
echo "checkpoint redis@$marked; redis's digest of all $keys keys and values is"
echo "  $digest"

step "4. Write on: now the database differs from the checkpoint"
start_load
sleep 4
stop_load
echo "its digest now is"
echo "  $(ask debug digest)"

step "5. Pull the plug: kill -9 for Redis and for Pagemark"
command_line "kill -9 $runner $redis"
# The shell would print a message about it.
{ kill -9 $runner "$redis" && wait $runner; } 2>/dev/null || true
runner=
while [ -e "/proc/$redis" ]; do sleep 0.05; done
if ask ping >/dev/null 2>&1; then fail "redis still answers"; fi
echo "redis is gone: nothing answers on port $port"
redis=

step "6. Bring it back"
command_line "pagemark restore redis@$marked"
begin=$(now_us)
"$pagemark" restore "redis@$marked" --detach 2>&1 || fail "the restore failed"
wait_for_redis
redis=$(ask info server | tr -d '\r' | sed -n 's/^process_id://p')
printf 'it answers again after %s s, as process %s\n' \
    "$(python3 -c "print(f'{($(now_us) - $begin) / 1e6:.1f}')")" "$redis"

step "7. Compare every key"
keys_after=$(ask dbsize)
digest_after=$(ask debug digest)
echo "at the checkpoint: $keys keys, $digest"
echo "restored:          $keys_after keys, $digest_after"
[ "$keys $digest" = "$keys_after $digest_after" ] || fail "the restored database is another one"

step "8. It serves on"
start_load
sleep 3
stop_load
ask shutdown nosave || true
redis=
command_line "pagemark verify"
"$pagemark" verify

step "Lost of what Redis held at checkpoint redis@$marked: nothing."
