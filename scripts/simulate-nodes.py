#!/usr/bin/env python3
"""Simulates a recorded machine on several nodes of Ray on this machine, and kills one meanwhile.

Before that, all nodes simulate it without a loss, and the speedup against one long simulation is
printed, and that of one node.

Each node has namespaces of its own (network, mounts, processes, host name), with a /tmp and a
/dev/shm of its own, and one processor of Ray. They share a directory with the repository and the
results. The results must be those of one long simulation, and the interval that the killed node had
must have been simulated by another. Needs root, QEMU, a C compiler, and an interpreter that has
pagemark[simulate].

    sudo PAGEMARK_PYTHON=python3 scripts/simulate-nodes.py target/debug/pagemark [--nodes 3]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PYTHON = os.environ.get("PAGEMARK_PYTHON", "python3")
SOURCES = Path(__file__).resolve().parents[1] / "crates" / "pagemark-testing" / "src"
COMPILER = (
    "cc -m32 -O2 -ffreestanding -fno-pic -fno-stack-protector -nostdlib -static "
    "-Wl,--section-start=.multiboot=0x100000 -Wl,-Ttext=0x101000 -Wl,--build-id=none "
    "-Wl,-z,max-page-size=4096 -Wl,-z,noexecstack"
)
#: Says that this process has the namespace of the network between the nodes.
INSIDE = "PAGEMARK_NODES_INSIDE"
PORT = 6379
#: What a node does, once it has its end of the network.
NODE = """
set -e
read -r _
hostname "$1"
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
ip address add "$2/24" dev node
ip link set node up
shift 2
exec "$@" >"$LOG" 2>&1
"""


def wait_for(event: str, condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"simulate-nodes: timeout: {event}")
        time.sleep(0.05)


class Node:
    """A node of Ray in namespaces of its own."""

    def __init__(self, number: int, attempt: int, directory: Path) -> None:
        self.name = f"node{number}"
        self.address = f"10.77.0.{number}"
        kind = ["--head", f"--node-ip-address={self.address}", f"--port={PORT}", "--include-dashboard=false"]
        if number > 1:
            kind = [f"--address=10.77.0.1:{PORT}", f"--node-ip-address={self.address}"]
        size = ["--num-cpus=1", f"--object-store-memory={100 << 20}", "--disable-usage-stats"]
        ray = [PYTHON, "-m", "ray.scripts.scripts", "start", *kind, *size, "--block"]
        spaces = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["unshare", *spaces, "sh", "-c", NODE, "sh", self.name, self.address, *ray]
        self.log = directory / f"{self.name}.log"
        environment = {**os.environ, "LOG": str(self.log)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True)
        own = os.readlink("/proc/self/ns/net")
        wait_for("a namespace", lambda: os.readlink(f"/proc/{self.process.pid}/ns/net") != own)
        self.network = os.readlink(f"/proc/{self.process.pid}/ns/net")
        peer = ["peer", "name", "node", "netns", str(self.process.pid)]
        port = f"port{number}-{attempt}"
        run("ip", "link", "add", "name", port, "type", "veth", *peer)
        run("ip", "link", "set", port, "master", "switch", "up")
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def command(self, *words: str) -> list[str]:
        """A command inside of the node."""
        first = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0]
        return ["nsenter", "--target", first, "--net", "--mount", "--uts", "--pid", "--", *words]

    def simulates(self) -> bool:
        """True while the node simulates an interval."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (process / "cmdline").read_text().split("\0")
                if arguments[1:3] == ["simulate", "interval"] and os.readlink(process / "ns/net") == self.network:
                    return True
            except OSError:
                continue
        return False

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """Ends all processes of the node at once."""
        self.process.kill()
        self.process.wait()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def simulate(program: str, nodes: int, intervals: int, every: str) -> None:
    directory = Path(tempfile.mkdtemp(prefix="pagemark-nodes-", dir="/var/tmp"))
    started: list[Node] = []
    try:
        guest, repository = directory / "guest", str(directory / "repository")
        run(*COMPILER.split(), "-o", str(guest), str(SOURCES / "guest.c"))
        machine = ["qemu-system-x86_64", "-nodefaults", "-m", "16", "-kernel", str(guest), "-serial", "null"]
        moments = ["--after", "40M", "--every", every, "--intervals", str(intervals)]
        run(program, "simulate", "record", "--repo", repository, "--quiet", "--job", "vm", *moments, "--", *machine)
        common = ["--repo", repository, "--plugin", "mix", "--json"]
        last = str(intervals + 1)
        began = time.monotonic()
        long = json.loads(run(program, "simulate", "interval", "vm@1", "--to", last, *common))
        long_seconds = time.monotonic() - began

        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "name", "switch", "type", "bridge")
        run("ip", "link", "set", "switch", "up")
        address = f"10.77.0.1:{PORT}"
        # It answers only when a node is there as a whole.
        alive = "sum(node['Alive'] for node in ray.nodes())"
        count = f"import ray; ray.init('{address}', log_to_driver=False); print({alive})"
        for number in range(1, nodes + 1):
            # Ray gives up a start that takes longer than 30 s, as on a busy machine.
            for attempt in range(10):
                node = Node(number, attempt, directory)
                started.append(node)
                head = started[0]
                wait_for("a node", lambda: node.has_ended() or ray_says(head, count) == str(number))
                if not node.has_ended():
                    break
                started.remove(node)
            else:
                sys.exit(f"simulate-nodes: {node.name} has ended: {node.log.read_text()[-2000:]}")

        def command_for(results: Path, workers: int) -> list[str]:
            where = ["--ray", address, "--workers", str(workers), "--results", str(results)]
            # Each node has a /dev/shm of its own.
            return head.command(program, "simulate", "run", "vm", *where, "--share", "/dev/shm/shared", *common)

        for workers in range(1, nodes + 1):
            # The first time includes the start of the workers.
            results = directory / f"results-{workers}"
            began = time.monotonic()
            merged = json.loads(run(*command_for(results, workers)))
            seconds = time.monotonic() - began
            if merged["results"] != long["results"]:
                sys.exit("simulate-nodes: the results are not those of one long simulation")
            shares = ", ".join(f"{node} {count}" for node, count in sorted(intervals_by_node(results).items()))
            print(f"{workers} at once: {seconds:.1f} s, {long_seconds / seconds:.2f} of one long simulation; {shares}")

        results = directory / "results"
        command = command_for(results, nodes)
        began = time.monotonic()
        with (directory / "messages").open("w") as messages:
            driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True)
            victim = started[-1]
            wait_for("an interval on the last node", lambda: victim.simulates() or driver.poll() is not None)
            if driver.poll() is not None:
                sys.exit(f"simulate-nodes: it ended before: {(directory / 'messages').read_text()}")
            victim.kill()
            output, _ = driver.communicate()
        seconds = time.monotonic() - began
        text = (directory / "messages").read_text()
        if driver.returncode != 0:
            sys.exit(f"simulate-nodes: status {driver.returncode}: {text}")
        merged = json.loads(output)
        if merged["results"] != long["results"] or merged["missing"]:
            sys.exit("simulate-nodes: the results are not those of one long simulation")
        by = intervals_by_node(results)
        if sum(by.values()) != intervals or nodes > 2 and len(by) < 2:
            sys.exit(f"simulate-nodes: {by}")
        shares = ", ".join(f"{node} {count}" for node, count in sorted(by.items()))
        print(f"{intervals} intervals, {merged['instructions']:,} instructions: as in one long simulation")
        print(f"one long simulation {long_seconds:.1f} s; {nodes} nodes, of which one was killed, {seconds:.1f} s")
        print(f"intervals by node: {shares}; {victim.name} was killed")
    finally:
        for node in started:
            node.kill()
        shutil.rmtree(directory)


def intervals_by_node(results: Path) -> dict[str, int]:
    (path,) = (results / "mix").glob("run-*.json")
    by: dict[str, int] = {}
    for interval in json.loads(path.read_text())["intervals"]:
        by[interval["node"]] = by.get(interval["node"], 0) + 1
    return by


def ray_says(node: Node, program: str) -> str:
    done = subprocess.run(node.command(PYTHON, "-c", program), capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="the program pagemark, with its plugin beside it")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--intervals", type=int, default=8)
    parser.add_argument("--every", default="8M", help="instructions from one checkpoint to the next")
    options = parser.parse_args()
    if options.nodes < 2:
        parser.error("one node is killed, so there must be two at least")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if INSIDE not in os.environ:
        # A token of its own, and not the user's.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ.update({INSIDE: "1", **token})
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])
    simulate(os.path.abspath(options.program), options.nodes, options.intervals, options.every)


if __name__ == "__main__":
    main()
