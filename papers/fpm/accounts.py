"""Accounts of a bank: objects of Python, whose fields and lists change, with the heap tracked.

The argument is a JSON object: accounts, steps, interval_ns, strategy (or null), file (or null).
Prints what was measured, as a JSON object.
"""

import ctypes
import json
import os
import resource
import sys
import time

task = json.loads(sys.argv[1])
STEPS_PER_CHECK = 64


class Checkpoint(ctypes.Structure):
    """The result of pagemark_heap_checkpoint."""

    _fields_ = [
        (name, ctypes.c_uint64) for name in ("faults", "merges", "splits", "bytes", "ranges", "collect_ns", "save_ns")
    ]


class Account:
    """An account with its last movements."""

    __slots__ = ("owner", "balance", "movements")

    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance
        self.movements = []


def check(error):
    """Ends the program if a function of the heap has failed."""
    if error != 0:
        sys.exit(f"the heap: {os.strerror(error)}")


def faults():
    """The page faults of this thread so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def waited_ns():
    """How long this thread has waited for a processor so far."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1])


def run():
    """Makes the accounts, moves amounts between them, and returns what was measured."""
    measured = dict.fromkeys([name for name, _ in Checkpoint._fields_] + ["checkpoints"], 0)
    strategy = task["strategy"]
    heap = ctypes.CDLL(None) if strategy else None
    file = os.open(task["file"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if task["file"] else -1
    taken = Checkpoint()
    if heap:
        check(heap.pagemark_heap_track(strategy.encode()))
        # Begins the first interval: nothing was written.
        check(heap.pagemark_heap_checkpoint(-1, ctypes.byref(taken)))
    own_faults = -faults()
    began_ns, began_waited_ns = time.perf_counter_ns(), waited_ns()
    interval_cpu_ns = time.thread_time_ns()

    def checkpoint():
        nonlocal own_faults, interval_cpu_ns
        own_faults += faults()
        check(heap.pagemark_heap_checkpoint(file, ctypes.byref(taken)))
        own_faults -= faults()
        measured["checkpoints"] += 1
        for name, _ in Checkpoint._fields_:
            measured[name] += getattr(taken, name)
        interval_cpu_ns = time.thread_time_ns()

    count, state = task["accounts"], 1
    accounts = [Account(f"owner {number}", 1000) for number in range(count)]
    for step in range(task["steps"]):
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        # Nine of ten movements are between a tenth of the accounts.
        among = count if state % 10 == 0 else count // 10
        source, sink = accounts[(state >> 20) % among], accounts[(state >> 40) % among]
        amount = state >> 59
        source.balance -= amount
        sink.balance += amount
        source.movements.append(-amount)
        if len(source.movements) > 8:
            del source.movements[0]
        if step % 16 == 0:
            sink.owner = f"owner {step}"
        if step % 64 == 0:
            closed = (state >> 30) % count
            accounts[closed] = Account("new", accounts[closed].balance)
        if heap and step % STEPS_PER_CHECK == 0 and time.thread_time_ns() - interval_cpu_ns >= task["interval_ns"]:
            checkpoint()
    if heap:
        checkpoint()
    own_faults += faults()
    waited = waited_ns() - began_waited_ns
    measured["elapsed_ns"] = time.perf_counter_ns() - began_ns - waited
    measured["waited_ns"] = waited
    measured["own_faults"] = own_faults
    if sum(account.balance for account in accounts) != 1000 * count:
        sys.exit("the sum of all balances has changed")
    return measured


print(json.dumps(run()))
