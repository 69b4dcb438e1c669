#!/usr/bin/env python3
"""Measures what the parallel simulation of a recorded machine gains on the processors of this machine.

Records a small guest, and simulates its intervals in turns: as one long simulation, one after the
other, by Ray with one worker and with as many as there are processors, and the same commands by
xargs. Prints the medians, and the efficiency: the time of the intervals one after the other, divided
by the workers and by the time with them. What xargs reaches is what the processors give; what Ray
needs more is ours. The results must be the same each time. Needs QEMU, a C compiler, and an
interpreter that has pagemark[simulate].

    PAGEMARK_PYTHON=python3 scripts/simulate-efficiency.py target/release/pagemark
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "crates" / "pagemark-testing" / "src"
COMPILER = (
    "cc -m32 -O2 -ffreestanding -fno-pic -fno-stack-protector -nostdlib -static "
    "-Wl,--section-start=.multiboot=0x100000 -Wl,-Ttext=0x101000 -Wl,--build-id=none "
    "-Wl,-z,max-page-size=4096 -Wl,-z,noexecstack"
)


class Measurement:
    """The ways of one recording."""

    def __init__(self, program: str, directory: Path, plugin: str, intervals: int) -> None:
        self.simulate = [program, "simulate"]
        self.directory = directory
        self.intervals = intervals
        self.options = ["--repo", str(directory / "repository"), "--plugin", plugin]
        self.share = ["--share", str(Path("/dev/shm") / directory.name)]
        self.results = directory / "results"

    def record(self, every: str) -> None:
        guest = self.directory / "guest"
        subprocess.run([*COMPILER.split(), "-o", str(guest), str(SOURCES / "guest.c")], check=True)
        moments = ["--after", "40M", "--every", every, "--intervals", str(self.intervals)]
        machine = ["qemu-system-x86_64", "-nodefaults", "-m", "16", "-kernel", str(guest), "-serial", "null"]
        options = [*self.options[:2], "--quiet", "--job", "vm", *moments]
        subprocess.run([*self.simulate, "record", *options, "--", *machine], check=True)

    def long(self) -> object:
        last = str(self.intervals + 1)
        command = [*self.simulate, "interval", "vm@1", "--to", last, *self.options, "--json"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["results"]

    def by_xargs(self, workers: int) -> object:
        keep = [*self.options, *self.share, "--results", str(self.results)]
        command = [*self.simulate, "interval", "vm@{}", *keep]
        numbers = "\n".join(map(str, range(1, self.intervals + 1)))
        one = " ".join(map(shlex.quote, command))
        xargs = ["xargs", "-P", str(workers), "-I{}", "sh", "-c", one]
        subprocess.run(xargs, input=numbers, text=True, check=True, stdout=subprocess.DEVNULL)
        merge = [*self.simulate, "merge", "vm", *self.options, "--results", str(self.results), "--json"]
        return json.loads(subprocess.run(merge, check=True, capture_output=True, text=True).stdout)["results"]

    def by_ray(self, workers: int) -> object:
        options = [*self.options, *self.share, "--results", str(self.results), "--workers", str(workers), "--json"]
        command = [*self.simulate, "run", "vm", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        return json.loads(done.stdout)["results"]

    def sum_of_intervals(self) -> tuple[float, float, float]:
        """Seconds of all starts, runs and comparisons of the last results."""
        kept = [json.loads(path.read_text()) for path in self.results.glob("*/[0-9]*.json")]
        start, run, compare = (sum(one[f"{part}_us"] for one in kept) / 1e6 for part in ("start", "run", "compare"))
        return start, run, compare

    def between(self) -> float:
        """Seconds of the last run of Ray from its start to the end of the last interval."""
        (path,) = self.results.glob("*/run-*.json")
        run = json.loads(path.read_text())
        return (max(interval["ended_unix_us"] for interval in run["intervals"]) - run["ready_unix_us"]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="the program pagemark, with its plugin beside it")
    parser.add_argument("--plugin", default="cache")
    parser.add_argument("--intervals", type=int, default=12)
    parser.add_argument("--every", default="60M", help="instructions from one checkpoint to the next")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="pagemark-efficiency-", dir="/var/tmp"))
    measurement = Measurement(os.path.abspath(options.program), directory, options.plugin, options.intervals)
    try:
        measurement.record(options.every)
        measure(measurement, options.turns, options.workers)
    finally:
        shutil.rmtree(directory)
        shutil.rmtree(measurement.share[1], ignore_errors=True)


def measure(measurement: Measurement, turns: int, workers: int) -> None:
    ways: dict[str, Callable[[], object]] = {
        "one long simulation": measurement.long,
        "one after the other": lambda: measurement.by_xargs(1),
        f"xargs, {workers} at once": lambda: measurement.by_xargs(workers),
        "Ray, 1 worker": lambda: measurement.by_ray(1),
        f"Ray, {workers} workers": lambda: measurement.by_ray(workers),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    parts: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways if not way.startswith("one long")}
    between: dict[str, list[float]] = {way: [] for way in ways if way.startswith("Ray")}
    first: object = None
    for turn in range(turns):
        print(f"turn {turn + 1} of {turns}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        for way, simulate in ways.items():
            shutil.rmtree(measurement.results, ignore_errors=True)
            began = time.monotonic()
            results = simulate()
            seconds[way].append(time.monotonic() - began)
            if way in parts:
                parts[way].append(measurement.sum_of_intervals())
            # The caches of an interval are empty at its begin, and those of one long simulation are not.
            if way != "one long simulation":
                first = first or results
                if results != first:
                    sys.exit(f"simulate-efficiency: {way}: the results are others")
            if way in between:
                between[way].append(measurement.between())
    alone = statistics.median(seconds["one after the other"])
    long = statistics.median(seconds["one long simulation"])
    print("| | seconds | starts, runs, comparisons in sum | speedup | against one long | efficiency |")
    print("|---|---|---|---|---|---|")
    for way in ways:
        taken, count = statistics.median(seconds[way]), workers if str(workers) in way else 1
        inner = statistics.median(between[way]) if way in between else taken
        cells = [
            f"{taken:.1f}" + (f" ({inner:.1f} between Ray's start and end)" if way in between else ""),
            ", ".join(f"{statistics.median(part):.1f}" for part in zip(*parts[way])) if way in parts else "",
            f"{alone / taken:.2f}",
            f"{long / taken:.2f}",
            f"{alone / taken / count:.0%}" + (f" ({alone / inner / count:.0%})" if way in between else ""),
        ]
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
