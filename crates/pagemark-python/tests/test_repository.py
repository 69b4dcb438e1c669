import mmap
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pagemark
import pytest

STENCIL = Path(__file__).parents[3] / "examples" / "python" / "stencil.py"
PAGE = pagemark.PAGE_SIZE


@pytest.fixture
def repository(tmp_path: Path) -> pagemark.Repository:
    return pagemark.Repository(tmp_path / "repository")


def test_an_opened_region_has_the_saved_content(repository: pagemark.Repository, mechanism: str) -> None:
    region = pagemark.Region(100 * PAGE, mechanism)
    array = numpy.frombuffer(region, dtype=numpy.int64)
    array[:] = numpy.arange(len(array))
    first = region.save(repository, "numbers")
    assert (first.job, first.sequence) == ("numbers", 1)
    array[513] = -1
    second = region.save(repository, "numbers")
    assert second.sequence == 2
    if mechanism != "full":
        assert second.written_bytes < first.written_bytes / 4
    array[:] = 0

    opened = pagemark.Region.open(repository, "numbers", mechanism)
    now = numpy.frombuffer(opened, dtype=numpy.int64)
    expected = numpy.arange(len(now))
    expected[513] = -1
    assert (now == expected).all()
    # The first save of an opened region is incremental.
    now[0] = 7
    third = opened.save(repository, "numbers")
    if mechanism != "full":
        assert third.written_bytes < first.written_bytes / 4
    assert repository.jobs() == ["numbers"]
    assert repository.checkpoints("numbers") == [first, second, third]
    assert repository.checkpoints("others") == []


def test_adopted_memory_is_loaded_in_place(repository: pagemark.Repository) -> None:
    saved = pagemark.Region(8 * PAGE)
    numpy.frombuffer(saved, dtype=numpy.uint8)[: 5 * PAGE] = 5
    saved.save(repository, "job")
    memory = mmap.mmap(-1, 8 * PAGE)
    array = numpy.frombuffer(memory, dtype=numpy.uint8)
    array[: 3 * PAGE] = 5
    array[7 * PAGE :] = 9
    region = pagemark.Region.adopt(memory, sole_use=True)
    assert region.load(repository, "job") == [range(3 * PAGE, 5 * PAGE), range(7 * PAGE, 8 * PAGE)]
    assert (array[: 5 * PAGE] == 5).all() and (array[5 * PAGE :] == 0).all()
    assert region.load(repository, "job") == []
    array[6 * PAGE] = 1
    region.save(repository, "job")
    assert bytes(pagemark.Region.open(repository, "job")) == array.tobytes()
    with pytest.raises(ValueError, match="same length"):
        pagemark.Region(PAGE).load(repository, "job")


def test_an_impossible_save_or_open_raises(repository: pagemark.Repository, tmp_path: Path) -> None:
    region = pagemark.Region(PAGE)
    with region.transaction(), pytest.raises(pagemark.TransactionError):
        region.save(repository, "job")
    with pytest.raises(ValueError, match="cannot be called"):
        region.save(repository, "../job")
    with pytest.raises(pagemark.RepositoryError, match="no checkpoint"):
        pagemark.Region.open(repository, "job")
    with pytest.raises(pagemark.RepositoryError, match="no repository"):
        pagemark.Repository(tmp_path / "nothing", create=False)
    assert repository.jobs() == []
    region.save(repository, "job")
    assert [checkpoint.sequence for checkpoint in repository.checkpoints("job")] == [1]


def test_a_repository_that_others_can_change_is_refused_unless_trusted(tmp_path: Path) -> None:
    path = tmp_path / "repository"
    pagemark.Repository(path)
    path.chmod(0o770)
    with pytest.raises(pagemark.RepositoryError, match="other users can change"):
        pagemark.Repository(path)
    assert pagemark.Repository(path, trusted=True).jobs() == []
    path.chmod(0o750)
    assert pagemark.Repository(path, create=False).jobs() == []


def test_a_computation_that_is_killed_continues_where_it_was_saved(tmp_path: Path) -> None:
    def command(name: str) -> list[str]:
        return [sys.executable, str(STENCIL), str(tmp_path / name), "400"]

    whole = subprocess.run(command("whole"), check=True, capture_output=True, text=True).stdout
    assert whole.startswith("begins at step 0\n")
    result = whole.splitlines()[-1]
    chance = random.Random(7)
    begun = []
    for _ in range(5):
        run = subprocess.Popen(command("killed"), stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        begun.append(int(run.stdout.readline().split()[-1]))
        for _ in range(chance.randrange(1, 4)):
            run.stdout.readline()
        time.sleep(chance.random() / 50)
        run.kill()
        assert run.wait() == -signal.SIGKILL
        run.stdout.close()
    assert begun[0] == 0 and begun == sorted(begun) and begun[-1] > 0
    assert all(step % 20 == 0 for step in begun)
    rest = subprocess.run(command("killed"), check=True, capture_output=True, text=True).stdout
    assert int(rest.splitlines()[0].split()[-1]) > begun[-1]
    assert rest.splitlines()[-1] == result


def test_snapshots_are_saved_and_opened(repository: pagemark.Repository) -> None:
    region = pagemark.Region(10 * PAGE)
    memoryview(region)[5000] = 1
    first = region.snapshot()
    memoryview(region)[5000] = 2
    saved = first.save(repository, "job")
    assert (saved.job, saved.sequence) == ("job", 1)
    store = pagemark.Store()
    opened = pagemark.Snapshot.open(repository, "job", store=store)
    assert opened.read(5000, 1) == b"\x01" and len(opened) == 10 * PAGE
    assert memoryview(pagemark.Region.open(repository, "job"))[5000] == 1
    region.save(repository, "other")
    assert pagemark.Snapshot.open(repository, "other", store=store).diff(opened) == [range(PAGE, 2 * PAGE)]
    with pytest.raises(pagemark.RepositoryError, match="no checkpoint"):
        pagemark.Snapshot.open(repository, "none")
