import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pagemark
import pytest
from patience import wait_until

KEEP = Path(__file__).parents[3] / "examples" / "python" / "keep.py"

# Counts in memory, in a quarter of its pages, and writes each number to a new file.
COUNTER = """
import os, sys, time
block = bytearray(os.urandom(4 << 20))
count = 0
while True:
    count += 1
    block[count * 4096 % (1 << 20)] ^= 1
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(count))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(0.002)
"""


def count(file: Path) -> int:
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return 0


class Counter:
    def __init__(self, directory: Path) -> None:
        self.file = directory / "count"
        command = [sys.executable, "-c", COUNTER, str(self.file)]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, cwd=directory, stdin=null, stdout=null, stderr=null, start_new_session=True
        )
        self.pid = self.process.pid
        wait_until("the program counts", lambda: self.count() > 0)

    def count(self) -> int:
        return count(self.file)

    def wait_until_it_counts(self) -> None:
        before = self.count()
        wait_until("the program continues to count", lambda: self.count() > before + 5)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def repository(tmp_path: Path) -> pagemark.Repository:
    return pagemark.Repository(tmp_path / "repository")


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[Counter]:
    if os.geteuid() != 0:
        pytest.skip("not root")
    counter = Counter(tmp_path)
    yield counter
    counter.kill()


@pytest.fixture
def criu(counter: Counter, tmp_path: Path) -> None:
    """Skips a test where CRIU is missing."""
    try:
        pagemark.Job(counter.pid, pagemark.Repository(tmp_path / "empty"), "probe").detach()
    except pagemark.CriuError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("criu")
@pytest.mark.parametrize("lazy", [False, True])
def test_a_process_that_was_killed_continues(
    repository: pagemark.Repository, counter: Counter, capfd: pytest.CaptureFixture[str], lazy: bool
) -> None:
    with pagemark.Job(counter.pid, repository, "counter") as job:
        assert job.mechanism in pagemark.MECHANISMS
        assert (job.pid, job.name) == (counter.pid, "counter")
        first = job.checkpoint()
        counter.wait_until_it_counts()
        at_least = counter.count()
        second = job.checkpoint()
    assert first.cost is not None and second.cost is not None
    assert first.cost.dirty_pages >= 1024 > second.cost.dirty_pages > 0
    assert second.cost.downtime_us >= second.cost.memory_downtime_us > 0
    assert (first.sequence, second.sequence) == (1, 2)
    listed = repository.checkpoints("counter")
    assert listed == [first, second] and listed[0].cost is None
    with pytest.raises(ValueError, match="detached"):
        job.checkpoint()

    # The program still has its process id.
    with pytest.raises(pagemark.PidInUseError, match=str(counter.pid)):
        pagemark.restore(repository, "counter")
    counter.wait_until_it_counts()

    counter.kill()
    counter.file.unlink()
    steps: list[tuple[int, int]] = []
    restored = pagemark.restore(
        repository,
        "counter",
        lazy=lazy,
        child=True,
        streams="null",
        progress=lambda done, total: steps.append((done, total)),
    )
    try:
        assert restored.pid == counter.pid and restored.pids == [counter.pid]
        # The program has it open for an instant each time it counts.
        assert {Path(file.path).name for file in restored.files} <= {"count.new"}
        assert steps == sorted(steps) and steps[-1][0] >= 4 << 20 and len({total for _, total in steps}) == 1
        wait_until("the program continues to count", counter.file.exists)
        assert counter.count() > at_least
        counter.wait_until_it_counts()
    finally:
        os.kill(restored.pid, signal.SIGKILL)
        assert os.waitpid(restored.pid, 0) == (counter.pid, signal.SIGKILL)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("criu")
def test_a_restored_process_can_be_stopped_and_a_child_of_init(
    repository: pagemark.Repository, counter: Counter
) -> None:
    with pagemark.Job(counter.pid, repository, "counter", strategy="stop-and-copy") as job:
        job.checkpoint()
        counter.wait_until_it_counts()
        job.checkpoint()
    counter.kill()
    counter.file.unlink()
    with pytest.raises(pagemark.RestoreError, match="stay stopped"):
        pagemark.restore(repository, "counter", 1, stopped=True, without_kvm=True)

    def fail(done: int, total: int) -> None:
        raise RuntimeError(f"{done} of {total}")

    with pytest.raises(RuntimeError) as raised:
        pagemark.restore(repository, "counter", 1, stopped=True, streams="null", progress=fail)
    assert raised.value.__notes__ == [f"process {counter.pid} was restored"]
    try:
        time.sleep(0.1)
        assert not counter.file.exists()
        os.kill(counter.pid, signal.SIGCONT)
        wait_until("the program continues to count", counter.file.exists)
        with pytest.raises(ChildProcessError):
            os.waitpid(counter.pid, os.WNOHANG)
    finally:
        os.kill(counter.pid, signal.SIGKILL)
        wait_until("the process is gone", lambda: not Path(f"/proc/{counter.pid}").exists())


def test_an_impossible_checkpoint_or_restore_raises(repository: pagemark.Repository, counter: Counter) -> None:
    with pytest.raises(ValueError, match="cannot be called"):
        pagemark.Job(counter.pid, repository, "../job", memory_only=True)
    with pytest.raises(ValueError, match="keep_last"):
        pagemark.Job(counter.pid, repository, "job", memory_only=True, keep_last=0)
    with pytest.raises(ValueError, match="strategy"):
        pagemark.Job(counter.pid, repository, "job", strategy="fork")  # type: ignore[arg-type]
    with pytest.raises(pagemark.MechanismError, match="uffd"):
        pagemark.Job(counter.pid, repository, "job", memory_only=True, mechanism="uffd")
    with pytest.raises(pagemark.ProcessError) as raised:
        pagemark.Job(os.getpid(), repository, "job", memory_only=True)
    assert not isinstance(raised.value, pagemark.ProcessGoneError)
    with pytest.raises(pagemark.RepositoryError, match="no checkpoint"):
        pagemark.restore(repository, "job")
    with pytest.raises(pagemark.RepositoryError, match="no checkpoint 3"):
        pagemark.restore(repository, "job", 3)
    with pytest.raises(ValueError, match="streams"):
        pagemark.restore(repository, "job", streams="none")  # type: ignore[arg-type]

    job = pagemark.Job(counter.pid, repository, "job", memory_only=True, mechanism="full")
    assert job.mechanism == "full"
    with pytest.raises(ValueError, match="positive"):
        job.run(every=0)
    job.checkpoint()
    with pytest.raises(pagemark.RestoreError, match="memory alone") as refused:
        pagemark.restore(repository, "job")
    assert not isinstance(refused.value, pagemark.PidInUseError)
    counter.kill()
    with pytest.raises(pagemark.ProcessGoneError):
        job.checkpoint()
    assert job.run(every=0.01) == 0
    with pytest.raises(pagemark.ProcessGoneError):
        pagemark.Job(counter.pid, repository, "job", memory_only=True)
    assert len(repository.checkpoints("job")) == 1


def test_a_missing_criu_raises_criu_error(
    repository: pagemark.Repository, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMARK_CRIU", "/no/such/criu")
    with pytest.raises(pagemark.CriuError, match="/no/such/criu"):
        pagemark.Job(counter.pid, repository, "job")


def test_a_job_runs_until_its_process_exits(repository: pagemark.Repository, counter: Counter) -> None:
    taken: list[pagemark.Checkpoint] = []

    def on_checkpoint(checkpoint: pagemark.Checkpoint) -> None:
        taken.append(checkpoint)
        if len(taken) == 4:
            counter.process.kill()

    job = pagemark.Job(counter.pid, repository, "job", memory_only=True, keep_last=2)
    assert job.run(every=0.02, on_checkpoint=on_checkpoint) == 4
    assert [checkpoint.sequence for checkpoint in taken] == [1, 2, 3, 4]
    assert repository.checkpoints("job") == taken[2:]
    with pytest.raises(ValueError, match="detached"):
        job.run()


def test_an_exit_between_two_checkpoints_ends_a_run(repository: pagemark.Repository, counter: Counter) -> None:
    killer = threading.Timer(0.3, counter.process.kill)
    job = pagemark.Job(counter.pid, repository, "job", memory_only=True)
    begin = time.monotonic()
    killer.start()
    # The timer's thread needs the interpreter, which the run has released.
    assert job.run(every=1000) == 0
    assert time.monotonic() - begin < 900


def test_a_failure_is_raised_or_reported(
    repository: pagemark.Repository, counter: Counter, tmp_path: Path
) -> None:
    job = pagemark.Job(counter.pid, repository, "job", memory_only=True)
    config = tmp_path / "repository" / "config"
    away = tmp_path / "config"
    # The copy would take the place of the config.
    (tmp_path / "repository" / "config.copy").unlink()
    config.rename(away)
    failures: list[Exception] = []
    taken: list[pagemark.Checkpoint] = []

    def on_failure(error: Exception) -> None:
        failures.append(error)
        away.rename(config)

    def on_checkpoint(checkpoint: pagemark.Checkpoint) -> None:
        taken.append(checkpoint)
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        job.run(0.02, on_checkpoint, on_failure)
    assert [type(error) for error in failures] == [pagemark.RepositoryError]
    assert repository.checkpoints("job") == taken and len(taken) == 1

    (tmp_path / "repository" / "config.copy").unlink(missing_ok=True)
    config.rename(away)
    with pytest.raises(pagemark.RepositoryError):
        pagemark.Job(counter.pid, repository, "other", memory_only=True).run(0.02)
    away.rename(config)
    counter.wait_until_it_counts()


def test_ctrl_c_ends_a_run(repository: pagemark.Repository, counter: Counter) -> None:
    job = pagemark.Job(counter.pid, repository, "job", memory_only=True)
    taken: list[pagemark.Checkpoint] = []
    with pytest.raises(KeyboardInterrupt):
        # While the run waits for the first checkpoint.
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        job.run(every=1000, on_checkpoint=taken.append)
    job = pagemark.Job(counter.pid, repository, "job", memory_only=True)
    with pytest.raises(KeyboardInterrupt):
        # While checkpoints are taken one after the other, some time after the first.
        def report(checkpoint: pagemark.Checkpoint) -> None:
            taken.append(checkpoint)
            if len(taken) == 1:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

        job.run(every=0.001, on_checkpoint=report)
    listed = repository.checkpoints("job")
    # A checkpoint that was being taken was completed, and not reported.
    assert taken and listed[: len(taken)] == taken and len(listed) <= len(taken) + 1
    counter.wait_until_it_counts()


def test_ctrl_c_ends_a_run_that_never_pauses(counter: Counter) -> None:
    taken: list[pagemark.Checkpoint] = []
    # In memory, a checkpoint of few pages takes a millisecond or two. A method of a list runs no
    # Python code, so that the interpreter handles the signal only if the run lets it.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        job = pagemark.Job(counter.pid, pagemark.Repository(Path(directory) / "repository"), "job", memory_only=True)
        job.checkpoint()

        def interrupt() -> None:
            while not taken:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        # The fallback ends the run if the signal does not.
        killer = threading.Timer(300, counter.process.kill)
        killer.start()
        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=interrupt, daemon=True).start()
            job.run(every=0.0001, on_checkpoint=taken.append)
        killer.cancel()
    assert taken and counter.process.poll() is None


def test_a_forked_child_cannot_use_a_job(repository: pagemark.Repository, counter: Counter) -> None:
    with pagemark.Job(counter.pid, repository, "job", memory_only=True) as job:
        child = os.fork()
        if child == 0:
            try:
                job.checkpoint()
            except pagemark.ForkedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0) == (child, 0)
        job.checkpoint()


@pytest.mark.usefixtures("criu")
def test_the_example_restores_a_program_that_is_killed(tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    directory.mkdir()
    file = directory / "count"
    program = [sys.executable, "-c", COUNTER, str(file)]
    command = [sys.executable, str(KEEP), str(directory / "repository"), *program]
    keep = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=directory)
    assert keep.stdout is not None
    begun = keep.stdout.readline().split()
    assert begun[:2] == ["keep:", "process"]
    pid = int(begun[2])
    repository = pagemark.Repository(directory / "repository")

    def is_checkpointed_since(begin_us: int) -> bool:
        return any(checkpoint.taken_unix_us > begin_us for checkpoint in repository.checkpoints("keep"))

    wait_until("the program counts", file.exists)
    try:
        for _ in range(2):
            at_least, now_us = count(file), time.time_ns() // 1000
            wait_until("the program is checkpointed", lambda: is_checkpointed_since(now_us))
            os.kill(pid, signal.SIGKILL)
            while "killed" not in (line := keep.stdout.readline()):
                assert line.startswith("keep: "), line
            assert line == f"keep: signal 9 killed process {pid}; it was restored\n"
            # The program may have had its file open in the freeze.
            while "was put back" in (line := keep.stdout.readline()):
                pass
            assert line.startswith(f"keep: process {pid} is checkpointed by"), line
            restored = count(file)
            wait_until("the program continues to count", lambda: count(file) != restored)
            assert count(file) > at_least > 0
    finally:
        keep.kill()
        keep.wait()
        keep.stdout.close()
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
