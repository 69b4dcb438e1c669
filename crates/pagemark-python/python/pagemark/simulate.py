"""Simulates the intervals of a recorded machine in parallel, as tasks of Ray.

A program: it asks ``pagemark simulate plan --json`` what is to be done. Each task runs ``pagemark
simulate interval``, which keeps its result in a file. All nodes need that program, QEMU, the
repository and the directory of the results, at the same paths. They do not need this package: Ray
brings the function of the tasks.

    python3 -m pagemark.simulate --workers 8 -- pagemark simulate plan vm1 --plugin cache --json

``pagemark simulate run`` starts it so.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, NoReturn, TypedDict

#: Exit status of an interval that is not the one that ran.
DIFFERS: int = 3

#: Exit status of a program that Ctrl-C ends.
INTERRUPTED: int = 130

#: How often Ray starts a task again whose worker was lost.
RETRIES: int = 3

#: Memory that a Ray of our own reserves. Results go to files, not through it.
OBJECT_STORE_BYTES: int = 100 << 20

#: How directories begin that have the files of a Ray of our own. Ray leaves its logs behind, and
#: sockets in it have short paths.
OWN: str = "/tmp/pagemark-ray-"

#: Seconds from one look at the tasks to the next.
LOOK: float = 0.5


class Interval(TypedDict):
    """An interval that is to be simulated."""

    #: Numbers of the checkpoints at its begin and at its end.
    begin: int
    end: int
    #: The command that simulates it.
    command: list[str]


class Plan(TypedDict):
    """What ``pagemark simulate plan --json`` says."""

    job: str
    plugin: str
    #: Variables of the commands.
    environment: dict[str, str]
    intervals: list[Interval]
    #: How many intervals have a result already.
    kept: int
    #: The directory of the record of this run.
    directory: str
    #: The command that merges the results.
    merge: list[str]


class Simulated(TypedDict):
    """What a task returns. Times are microseconds since 1970 by the clock of the node."""

    status: int
    message: str
    output: str
    node: str
    worker: int
    started_unix_us: int
    ended_unix_us: int


class Failed(Exception):
    """An interval could not be simulated, or is not the one that ran."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status: int = status


def now_us() -> int:
    return time.time_ns() // 1000


def simulate(command: list[str], environment: dict[str, str]) -> Simulated:
    """Simulates an interval, in a worker. Raises if it is to be tried again."""
    started = now_us()
    # Where the worker is killed, the command ends by itself.
    command = [*command, "--parent", str(os.getpid())]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        output, message = child.communicate()
    finally:
        child.kill()
        child.wait()
    if child.returncode < 0:
        raise RuntimeError(f"signal {-child.returncode} has killed the simulation")
    return {
        "status": child.returncode,
        "message": message,
        "output": output,
        "node": os.uname().nodename,
        "worker": os.getpid(),
        "started_unix_us": started,
        "ended_unix_us": now_us(),
    }


class Progress:
    """A line on a terminal, or a line for each interval elsewhere."""

    def __init__(self, plan: Plan) -> None:
        self.job: str = plan["job"]
        self.all: int = plan["kept"] + len(plan["intervals"])
        self.kept: int = plan["kept"]
        self.done: int = 0
        self.began: float = time.monotonic()
        self.is_terminal: bool = sys.stderr.isatty()

    def show(self) -> None:
        if not self.is_terminal:
            return
        passed = time.monotonic() - self.began
        complete = self.kept + self.done
        cells = 30 * complete // self.all
        line = f"{self.job}: {'█' * cells}{'·' * (30 - cells)} {complete} of {self.all} intervals, {passed:.0f} s"
        if self.done:
            line += f", about {passed / self.done * (self.all - complete):.0f} s more"
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def add(self, interval: Interval, simulated: Simulated) -> None:
        self.done += 1
        seconds = (simulated["ended_unix_us"] - simulated["started_unix_us"]) / 1e6
        if not self.is_terminal:
            name = f"{self.job}@{interval['begin']} to {self.job}@{interval['end']}"
            where = f"in {seconds:.1f} s on {simulated['node']}, process {simulated['worker']}"
            print(f"pagemark: {name}: {where} ({self.kept + self.done} of {self.all})", file=sys.stderr, flush=True)
        self.show()

    def end(self) -> None:
        if self.is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Run:
    """A run of the intervals of a plan."""

    def __init__(self, plan: Plan, address: str, limit: int | None) -> None:
        self.plan: Plan = plan
        #: ``auto``: the Ray that runs here, or one of our own. Otherwise an address.
        self.address: str = address
        #: How many tasks run at once, at most.
        self.limit: int | None = limit
        self.started: int = now_us()
        self.ready: int = 0
        self.workers: int = 0
        self.simulated: list[dict[str, Any]] = []
        #: The files of a Ray of our own.
        self.own: str | None = None

    def connect(self) -> None:
        """Connects to Ray, and starts one where none is asked for and none runs."""
        # Nothing is reported to its makers.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if not self.join(quiet):
            self.own = tempfile.mkdtemp(prefix=os.path.basename(OWN), dir=os.path.dirname(OWN))
            ray.init(
                address="local",
                num_cpus=self.limit,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=self.own,
                **quiet,
            )
        processors = int(ray.cluster_resources().get("CPU", 0))
        self.workers = min(processors, self.limit or processors)
        self.ready = now_us()

    def join(self, quiet: dict[str, Any]) -> bool:
        """Connects to a Ray that runs. False if none is asked for, and none runs but those of other runs.

        :raises Failed: the Ray that is asked for does not answer.
        """
        import ray

        address = self.address
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            if address == "auto":
                return False
            hint = "if that Ray asks for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN if Ray keeps none"
            raise Failed(f"pagemark: cannot connect to Ray at {address}: {error}\nhelp: {hint}", 1) from None
        # One that another run has started ends with that run.
        if address == "auto" and any(node["RayletSocketName"].startswith(OWN) for node in ray.nodes()):
            ray.shutdown()
            return False
        return True

    def simulate(self) -> None:
        """Simulates all intervals.

        :raises Failed: one of them is not the one that ran, or cannot be simulated.
        """
        import ray

        task = ray.remote(num_cpus=1, max_retries=RETRIES, retry_exceptions=True)(simulate)
        progress = Progress(self.plan)
        waiting = list(reversed(self.plan["intervals"]))
        running: dict[Any, Interval] = {}
        try:
            while waiting or running:
                # Without a limit Ray starts as many at once as there are processors, also those of later nodes.
                while waiting and len(running) < (self.limit or len(self.plan["intervals"])):
                    interval = waiting.pop()
                    running[task.remote(interval["command"], self.plan["environment"])] = interval
                ready, _ = ray.wait(list(running), num_returns=1, timeout=LOOK)
                for reference in ready:
                    interval = running.pop(reference)
                    progress.add(interval, self.take(reference, interval))
                progress.show()
        finally:
            progress.end()

    def take(self, reference: Any, interval: Interval) -> Simulated:
        """Takes the result of a task."""
        import ray

        job = self.plan["job"]
        name = f"{job}@{interval['begin']} to {job}@{interval['end']}"
        try:
            simulated: Simulated = ray.get(reference)
        except (ray.exceptions.RayError, RuntimeError) as error:
            raise Failed(f"pagemark: cannot simulate {name}, tried {RETRIES + 1} times: {error}", 1) from None
        if simulated["status"] != 0:
            message = simulated["message"].rstrip()
            raise Failed(f"{message}\non {simulated['node']}", DIFFERS if simulated["status"] == DIFFERS else 1)
        done = json.loads(simulated["output"])
        measured = {key: done[key] for key in ("instructions", "start_us", "warm_up_us", "run_us", "compare_us")}
        run: dict[str, Any] = {**simulated}
        where = {key: run[key] for key in ("node", "worker", "started_unix_us", "ended_unix_us")}
        self.simulated.append({"from": interval["begin"], "to": interval["end"], **where, **measured})
        return simulated

    def write_record(self) -> None:
        """Keeps what ran where and when, for ``pagemark simulate report``."""
        record = {
            "job": self.plan["job"],
            "plugin": self.plan["plugin"],
            "workers": self.workers,
            "started_unix_us": self.started,
            "ready_unix_us": self.ready,
            "ended_unix_us": now_us(),
            "intervals": self.simulated,
        }
        os.makedirs(self.plan["directory"], exist_ok=True)
        path = os.path.join(self.plan["directory"], f"run-{self.started}.json")
        with open(path + ".partial", "w") as file:
            json.dump(record, file)
        os.rename(path + ".partial", path)

    def end(self) -> None:
        """Ends the tasks that still run, and a Ray of our own."""
        import ray

        # Ray kills the workers of a program that leaves it. To cancel tasks before that would be too much: where one
        # ends in that moment, Ray 2.60 aborts this program.
        ray.shutdown()
        if self.own is not None:
            shutil.rmtree(self.own, ignore_errors=True)


def read_plan(command: list[str]) -> Plan:
    """Asks a command for the plan. Its own message says why it fails.

    :raises SystemExit: it fails.
    """
    asked = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if asked.returncode != 0:
        sys.exit(asked.returncode if asked.returncode > 0 else 1)
    plan: Plan = json.loads(asked.stdout)
    return plan


def arguments() -> argparse.Namespace:
    """The arguments of the program."""
    parser = argparse.ArgumentParser(prog="pagemark.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--ray", default="auto", help="HOST:PORT; auto: the Ray that runs here, or a new one")
    parser.add_argument("--workers", type=int, help="simulate at most so many intervals at once")
    parser.add_argument("--json", action="store_true", help="the merged results as one JSON document")
    parser.add_argument("command", nargs="+", help="the command that prints the plan, behind --")
    return parser.parse_args()


def main() -> NoReturn:
    """The program."""
    asked = arguments()
    try:
        plan = read_plan(asked.command)
        simulate_all(plan, asked.ray, asked.workers)
    except Failed as error:
        print(error, file=sys.stderr)
        print("what was simulated is kept; the same command goes on from there", file=sys.stderr)
        sys.exit(error.status)
    except KeyboardInterrupt:
        print("pagemark: interrupted; the same command goes on from there", file=sys.stderr)
        sys.exit(INTERRUPTED)
    merge = [*plan["merge"], "--json"] if asked.json else plan["merge"]
    os.execv(merge[0], merge)


def simulate_all(plan: Plan, address: str, limit: int | None) -> None:
    """Simulates the intervals of a plan, and keeps a record of that.

    :raises Failed: one of them is not the one that ran, or cannot be simulated.
    """
    if not plan["intervals"]:
        return
    # Ray reports lost workers on the standard output, which is for the merged results.
    output = os.dup(1)
    os.dup2(2, 1)
    run = Run(plan, address, limit)
    try:
        run.connect()
        run.simulate()
    finally:
        if run.simulated:
            run.write_record()
        run.end()
    sys.stdout.flush()
    os.dup2(output, 1)


if __name__ == "__main__":
    main()
