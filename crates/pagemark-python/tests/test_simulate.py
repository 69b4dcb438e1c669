"""The intervals of a recorded machine, simulated in parallel by a real Ray."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from pagemark import simulate
from patience import wait_until

#: The program pagemark, which the test script builds.
PROGRAM = os.environ.get("PAGEMARK_PROGRAM", "")
GUEST = Path(__file__).parents[2] / "pagemark-testing" / "src" / "guest.c"
QEMU = "qemu-system-x86_64"
#: As in the Rust tests.
COMPILER = (
    "cc -m32 -O2 -ffreestanding -fno-pic -fno-stack-protector -nostdlib -static "
    "-Wl,--section-start=.multiboot=0x100000 -Wl,-Ttext=0x101000 -Wl,--build-id=none "
    "-Wl,-z,max-page-size=4096 -Wl,-z,noexecstack"
)
INTERVALS = 6
# Ray gives up a start that takes longer than 30 s, as on a busy machine.
RAY_STARTS = 10
TOKEN = secrets.token_hex(32)
#: A Ray that lives until its standard input is closed, and says its address.
RAY = """
import ray, sys
context = ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20,
                   _temp_dir=sys.argv[1], logging_level="error", log_to_driver=False)
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
#: Connects as a run that names no Ray does, and says what of Ray is its own.
CONNECTS = """
from pagemark import simulate
run = simulate.Run({}, "auto", 1)
run.connect()
print(run.own)
run.end()
"""


def processes_with(word: str) -> list[int]:
    """The processes that have a word in their command line."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (directory / "cmdline").read_bytes()
        except OSError:
            continue
        if word.encode() in arguments and int(directory.name) != os.getpid():
            found.append(int(directory.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Recording:
    """A recorded machine, whose processes have the name of its directory in their command lines."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # The directory of the caller. No module is taken from it.
        for module in ("pagemark", "ray", "runpy"):
            (directory / f"{module}.py").write_text(f"raise SystemExit('{module} is that of the caller')\n")
        guest = directory / "guest"
        subprocess.run([*COMPILER.split(), "-o", str(guest), str(GUEST)], check=True)
        # The firmware has loaded the guest by then.
        moments = ["--after", "40M", "--every", "1M", "--intervals", str(INTERVALS)]
        machine = [QEMU, "-nodefaults", "-m", "16", "-kernel", str(guest), "-serial", f"file:{directory}/serial"]
        self.done("record", "--quiet", "--job", "vm", *moments, "--", *machine)

    def command(self, *arguments: str) -> list[str]:
        return [PROGRAM, "simulate", arguments[0], "--repo", str(self.directory / "repository"), *arguments[1:]]

    def done(self, *arguments: str) -> str:
        command = self.command(*arguments)
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.directory, env=environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, results: Path, *options: str, messages: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
        shared = str(self.directory / "shared")
        common = ["--plugin", "mix", "--results", str(results), "--share", shared, "--json"]
        command = self.command("run", "vm", *common, *options)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=messages, text=True, cwd=self.directory, env=environment()
        )

    def nothing_runs(self) -> bool:
        return not processes_with(str(self.directory))


def environment() -> dict[str, str]:
    # A token of the tests' own, and not the user's.
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
    return {**os.environ, **ray, "PAGEMARK_PYTHON": sys.executable}


def kept(results: Path) -> dict[str, int]:
    """The kept results, with the times of their files."""
    return {path.name: path.stat().st_mtime_ns for path in (results / "mix").glob("[0-9]*.json")}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    pytest.importorskip("ray")
    if not PROGRAM:
        pytest.skip("PAGEMARK_PROGRAM does not name the program pagemark")
    if os.geteuid() != 0:
        pytest.skip("not root")
    if shutil.which(QEMU) is None or shutil.which("cc") is None:
        pytest.skip("no QEMU, or no compiler for its guest")
    return Recording(tmp_path_factory.mktemp("recording"))


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray that all tests use but those that examine one of Pagemark's own."""
    pytest.importorskip("ray")
    with running_ray(Path(f"/tmp/pagemark-test-ray-{os.getpid()}")) as address:
        yield address


@contextmanager
def running_ray(directory: Path) -> Iterator[str]:
    """A Ray with its files in a directory, by its address."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", RAY, str(directory)]
    for _ in range(RAY_STARTS):
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment()) as ray:
            assert ray.stdin is not None and ray.stdout is not None
            if address := ray.stdout.readline().strip():
                yield address
                ray.stdin.close()
                break
    shutil.rmtree(directory)


def test_a_killed_run_leaves_no_processes(recording: Recording, tmp_path: Path) -> None:
    results = tmp_path / "results"
    own: set[str] = set()
    for _ in range(RAY_STARTS):
        # With a Ray of its own, where none runs.
        with recording.run(results) as driver:
            wait_until("an interval is simulated", lambda: len(kept(results)) > 0 or driver.poll() is not None)
            own = {word for pid in processes_with("pagemark-ray-") for word in arguments(pid) if "/session_" in word}
            driver.kill()
        if kept(results):
            break
    wait_until("no simulation runs", recording.nothing_runs)
    wait_until("Ray has ended", lambda: not any(processes_with(word) for word in own))
    for word in own:
        directory = word[word.index("/tmp/pagemark-ray-") :].split("/")[2]
        shutil.rmtree(Path("/tmp") / directory, ignore_errors=True)
    assert 0 < len(kept(results)) < INTERVALS and not list(results.rglob("*.partial"))


def test_a_run_does_not_use_the_ray_of_another_run() -> None:
    pytest.importorskip("ray")
    with running_ray(Path(f"{simulate.OWN}test-{os.getpid()}")):
        command = [sys.executable, "-c", CONNECTS]
        own, messages = "", ""
        for _ in range(RAY_STARTS):
            done = subprocess.run(command, capture_output=True, text=True, env=environment())
            own, messages = done.stdout.strip(), done.stderr
            if done.returncode == 0:
                break
    assert own.startswith(simulate.OWN) and not Path(own).exists(), messages


def test_a_run_goes_on_and_tries_again_what_a_killed_worker_has_lost(
    recording: Recording, ray_address: str, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    recording.done("interval", "vm@2", "--plugin", "mix", "--results", str(results))
    before = kept(results)
    with recording.run(results, "--ray", ray_address) as driver:
        killed = 0
        while driver.poll() is None and killed == 0:
            simulations = filter(is_simulation, processes_with(str(recording.directory)))
            # One whose worker has ended has another parent by now.
            killed = next(filter(is_worker, map(parent, simulations)), 0)
            time.sleep(0.02)
        if killed:
            os.kill(killed, signal.SIGKILL)
        output, messages = driver.communicate()
    assert driver.returncode == 0 and killed, messages
    after = kept(results)
    assert len(after) == INTERVALS and {name: after[name] for name in before} == before, "they were not simulated again"
    long = json.loads(recording.done("interval", "vm@1", "--to", str(INTERVALS + 1), "--plugin", "mix", "--json"))
    merged = json.loads(output)
    assert merged["results"] == long["results"] and merged["missing"] == []
    (record,) = (results / "mix").glob("run-*.json")
    run: dict[str, Any] = json.loads(record.read_text())
    simulated = {f"{interval['from']}-{interval['to']}.json" for interval in run["intervals"]}
    assert simulated == after.keys() - before.keys()
    assert killed not in {interval["worker"] for interval in run["intervals"]}
    assert run["started_unix_us"] < run["ready_unix_us"] < run["ended_unix_us"]
    page = tmp_path / "report.html"
    report = ["report", "vm", "--plugin", "mix", "--results", str(results)]
    recording.done(*report, "--html", str(page))
    assert "<svg" in page.read_text() and f"process {run['intervals'][0]['worker']}" in page.read_text()
    reported = json.loads(recording.done(*report, "--json"))
    assert reported["ran"] == run["intervals"] and reported["simulated"] == INTERVALS - 1
    assert "had a result before" in recording.done(*report)
    wait_until("no simulation runs", recording.nothing_runs)


def arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def is_worker(pid: int) -> bool:
    return "".join(arguments(pid)[:1]).startswith("ray::")


def is_simulation(pid: int) -> bool:
    """True for the program that a worker has started, not for its guard."""
    try:
        return arguments(pid)[1:3] == ["simulate", "interval"] and Path(f"/proc/{pid}/comm").read_text() == "pagemark\n"
    except OSError:
        return False


def test_ctrl_c_ends_all_simulations(recording: Recording, ray_address: str, tmp_path: Path) -> None:
    results, log = tmp_path / "results", tmp_path / "messages"
    with log.open("w") as file, recording.run(results, "--ray", ray_address, messages=file) as driver:
        # A result is kept before the run hears of it.
        reported = f" of {INTERVALS})"
        wait_until("an interval is reported", lambda: reported in log.read_text() or driver.poll() is not None)
        driver.send_signal(signal.SIGINT)
        output, _ = driver.communicate()
    messages = log.read_text()
    assert driver.returncode == simulate.INTERRUPTED and "goes on from there" in messages, messages
    assert output == "" and 0 < len(kept(results)) < INTERVALS
    wait_until("no simulation runs", recording.nothing_runs)
    (record,) = (results / "mix").glob("run-*.json")
    assert len(json.loads(record.read_text())["intervals"]) == messages.count(reported)


def test_a_repository_that_vanishes_ends_the_run_which_goes_on_when_it_is_back(
    recording: Recording, ray_address: str, tmp_path: Path
) -> None:
    results, log = tmp_path / "results", tmp_path / "messages"
    repository, away = recording.directory / "repository", recording.directory / "away"
    options = ["--ray", ray_address, "--workers", "1"]
    with log.open("w") as file, recording.run(results, *options, messages=file) as driver:
        reported = f" of {INTERVALS})"
        wait_until("an interval is reported", lambda: reported in log.read_text() or driver.poll() is not None)
        repository.rename(away)
        output, _ = driver.communicate()
    messages, before = log.read_text(), kept(results)
    try:
        with recording.run(results, *options) as driver:
            _, refused = driver.communicate()
        assert driver.returncode == 1 and str(repository) in refused, refused
    finally:
        away.rename(repository)
    assert "goes on from there" in messages and str(repository) in messages, messages
    assert output == "" and 0 < len(before) < INTERVALS
    with recording.run(results, *options) as driver:
        output, messages = driver.communicate()
    assert driver.returncode == 0, messages
    after = kept(results)
    assert len(after) == INTERVALS and {name: after[name] for name in before} == before
    long = json.loads(recording.done("interval", "vm@1", "--to", str(INTERVALS + 1), "--plugin", "mix", "--json"))
    assert json.loads(output)["results"] == long["results"]


@pytest.mark.parametrize(("status", "expected"), [(simulate.DIFFERS, simulate.DIFFERS), (2, 1)])
def test_an_interval_that_differs_ends_the_run(ray_address: str, tmp_path: Path, status: int, expected: int) -> None:
    tries, slept = tmp_path / "tries", tmp_path / "slept"
    differs = f"echo a try >> {tries}; echo vm@1 has another page >&2; exit {status}"
    slow = f"sleep 60; echo > {slept}"
    plan: simulate.Plan = {
        "job": "vm",
        "plugin": "mix",
        "environment": {},
        "kept": 0,
        "directory": str(tmp_path / "record"),
        "merge": ["/bin/false"],
        "intervals": [
            {"begin": begin, "end": begin + 1, "command": ["sh", "-c", command]}
            for begin, command in [(1, slow), (2, differs)]
        ],
    }
    planned = tmp_path / "plan.json"
    planned.write_text(json.dumps(plan))
    command = [sys.executable, "-m", "pagemark.simulate", "--ray", ray_address, "--", "cat", str(planned)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == expected and "vm@1 has another page" in done.stderr, done.stderr
    assert tries.read_text() == "a try\n" and not slept.exists()
