"""What threads may do with the same objects, with and without Python's global lock."""

import gc
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
import numpy.typing
import pagemark
import pytest

PAGE = pagemark.PAGE_SIZE


def test_importing_the_package_does_not_turn_the_global_lock_on() -> None:
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("this Python has a global lock")
    assert not sys._is_gil_enabled()  # type: ignore[attr-defined,unused-ignore]


def run_together(works: list[Callable[[], None]]) -> None:
    """Calls each in a thread of its own, at the same time, and raises what the first of them raised."""
    barrier = threading.Barrier(len(works))
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def collect() -> None:
    # A collection stops all threads of a Python without the global lock.
    for _ in range(3):
        gc.collect()


def test_views_come_and_go_while_the_region_is_closed() -> None:
    for _ in range(10):
        region = pagemark.Region(4 * PAGE, "compare")
        closed = threading.Event()

        def view() -> None:
            while not closed.is_set():
                try:
                    memoryview(region).release()
                    memoryview(region.snapshot()).release()
                except ValueError as error:
                    assert str(error) == "the region is closed"
                    return

        def close() -> None:
            try:
                while not region.closed:
                    try:
                        region.close()
                    except BufferError:
                        pass
            finally:
                closed.set()

        run_together([view, view, close, collect])


def test_a_snapshot_is_viewed_by_threads() -> None:
    region = pagemark.Region(64 * PAGE, "compare")
    numpy.frombuffer(region, "u1")[:] = 7
    snapshot = region.snapshot()

    def view() -> None:
        for _ in range(20):
            assert numpy.frombuffer(snapshot, "u1").sum() == 7 * 64 * PAGE

    run_together([view, view, view, collect])


def test_one_transaction_is_ended_by_one_thread() -> None:
    region = pagemark.Region(16 * PAGE, "compare")
    table = numpy.frombuffer(region, "u1")
    for number in range(1, 11):
        transaction = region.transaction()
        transaction.__enter__()
        table[PAGE] = number
        ended: list[object] = []

        def roll_back() -> None:
            try:
                transaction.rollback()
                ended.append(transaction.written)
            except pagemark.TransactionError:
                pass

        run_together([roll_back, roll_back, collect])
        assert len(ended) == 1
        assert table[PAGE] == 0
        assert not region.in_transaction


def test_each_thread_has_its_own_region() -> None:
    def work() -> None:
        region = pagemark.Region(64 * PAGE)
        table = numpy.frombuffer(region, "u8").reshape(64, -1)
        for round in range(20):
            with region.transaction() as transaction:
                table[round % 64] = round + 1
            assert transaction.written is not None
            assert numpy.asarray(transaction.written).tolist() == [[round % 64 * PAGE, (round % 64 + 1) * PAGE]]
            past = region.snapshot()
            assert numpy.frombuffer(past, "u8").reshape(64, -1)[round % 64, 3] == round + 1

    run_together([work, work, work, collect])


def test_threads_make_the_same_arrays_of_a_heap(tmp_path: Path) -> None:
    repository = pagemark.Repository(tmp_path / "repository")
    heap = pagemark.SavedHeap(repository, "threads")

    def work() -> None:
        for number in range(50):
            array = heap.array(f"number {number}", 100, "u8")
            assert array.shape == (100,)
            array[number] = number
            del array

    run_together([work, work, work, collect])
    assert len(heap) == 50
    for number in range(50):
        assert heap[f"number {number}"].sum() == number
    heap.close()


class Writers:
    """Threads that count in pages of their own, and say before and after each write what a page holds."""

    def __init__(self, table: numpy.typing.NDArray[numpy.uint64], threads: int) -> None:
        pages = len(table) // threads
        self.table = table
        # Before a write to a page, and after it.
        self.begun = numpy.zeros(len(table), "u8")
        self.done = numpy.zeros(len(table), "u8")
        self.stop = threading.Event()
        self.works = [self.work(number * pages, (number + 1) * pages) for number in range(threads)]

    def work(self, first: int, end: int) -> Callable[[], None]:
        def write() -> None:
            count, page = 0, first
            while not self.stop.is_set():
                count += 1
                self.begun[page] = count
                # Two words, of which a snapshot may have the first alone.
                self.table[page, 7] = count
                self.table[page, 500] = count
                self.done[page] = count
                page = page + 1 if page + 1 < end else first

        return write


@pytest.mark.parametrize("rollback", [True, False])
def test_threads_write_while_others_use_the_same_region(mechanism: str, rollback: bool) -> None:
    """Each snapshot and each commit has what was written before it, and nothing that was written after it."""
    pages = 64
    region = pagemark.Region(pages * PAGE, mechanism, rollback=rollback)
    table = numpy.frombuffer(region, "u8").reshape(pages, -1)
    writers = Writers(table, 2)
    snapshots: list[pagemark.Snapshot] = []

    def take_snapshots() -> None:
        for _ in range(10):
            done = writers.done.copy()
            snapshot = region.snapshot()
            begun = writers.begun.copy()
            held = numpy.frombuffer(snapshot, "u8").reshape(pages, -1)[:, [7, 500]]
            assert (held >= done[:, None]).all() and (held <= begun[:, None]).all()
            assert snapshot.read(7 * 8, 8) == held[0, 0].tobytes()
            snapshots.append(snapshot)

    def commit() -> None:
        replica = pagemark.Region(pages * PAGE, "compare")
        copy = numpy.frombuffer(replica, "u8").reshape(pages, -1)
        for _ in range(10):
            region.begin()
            before = writers.begun.copy()
            pause.wait(0.001)
            after = writers.done.copy()
            changes = region.commit_changes()
            written = {page for part in changes.offsets for page in range(part.start // PAGE, -(-part.stop // PAGE))}
            changes.apply(replica)
            # What was begun before the transaction may have been written before it.
            for page in numpy.flatnonzero(after > before).tolist():
                assert page in written
                assert (copy[page, [7, 500]] >= after[page]).all()

    def work_together(work: Callable[[], None]) -> Callable[[], None]:
        def until_it_ends() -> None:
            try:
                work()
            finally:
                with ending:
                    at_work.pop()
                    if not at_work:
                        writers.stop.set()

        return until_it_ends

    pause, ending = threading.Event(), threading.Lock()
    works = [take_snapshots, commit]
    at_work = list(works)
    run_together([*writers.works, *map(work_together, works), collect])
    final = region.snapshot()
    assert (numpy.frombuffer(final, "u8") == table.reshape(-1)).all()
    region.restore(snapshots[0])
    assert (numpy.frombuffer(snapshots[0], "u8") == table.reshape(-1)).all()
    assert region.snapshot() == snapshots[0]


def test_threads_begin_and_end_transactions_of_one_region() -> None:
    """Each begin has one end, whichever thread makes it."""
    region = pagemark.Region(16 * PAGE, "compare")
    counts = dict.fromkeys(["begin", "end"], 0)
    counting = threading.Lock()

    def work(operations: list[tuple[str, Callable[[], object]]]) -> Callable[[], None]:
        def run() -> None:
            for number in range(100):
                name, operation = operations[number % len(operations)]
                try:
                    operation()
                except pagemark.TransactionError:
                    continue
                with counting:
                    counts[name] += 1

        return run

    begin, commit, rollback = ("begin", region.begin), ("end", region.commit), ("end", region.rollback)
    run_together([work([begin, commit]), work([begin, rollback]), work([commit, begin]), collect])
    assert counts["begin"] - counts["end"] == int(region.in_transaction)


def test_a_transaction_object_ends_no_other_transaction() -> None:
    """Threads that end the same object leave alone the transaction that another thread begins meanwhile."""
    region = pagemark.Region(256 * PAGE, "compare")
    table = numpy.frombuffer(region, "u1")
    for number in range(50):
        shared = region.transaction()
        shared.__enter__()
        table[::PAGE] = number

        def end() -> None:
            try:
                shared.rollback()
            except pagemark.TransactionError:
                pass

        def begin_next() -> None:
            while True:
                try:
                    region.begin()
                    break
                except pagemark.TransactionError:
                    pass
            table[:PAGE] = number % 255 + 1
            region.commit()

        run_together([end, end, end, begin_next])
        assert table[7] == number % 255 + 1


def test_one_thread_enters_a_transaction_object() -> None:
    region = pagemark.Region(16 * PAGE, "compare")
    for _ in range(50):
        transaction = region.transaction()
        entered: list[object] = []

        def enter_and_leave() -> None:
            try:
                with transaction:
                    entered.append(transaction)
            except pagemark.TransactionError:
                pass

        run_together([enter_and_leave] * 3)
        assert len(entered) == 1


def test_names_of_a_heap_are_whole_in_each_checkpoint(tmp_path: Path) -> None:
    """Threads make and free names while another one takes checkpoints."""
    repository = pagemark.Repository(tmp_path / "repository")
    heap = pagemark.SavedHeap(repository, "names")
    # Takes the checkpoints some time.
    large = heap.array("large", 4 << 20, "u1")
    ended = threading.Event()

    def change(thread: str) -> Callable[[], None]:
        def run() -> None:
            count = 0
            while not ended.is_set():
                count += 1
                name = thread + " " + "x" * (count * 997 % 20000) + str(count)
                heap.buffer(name, count * 499 % 20000)
                del heap[name]

        return run

    def save() -> None:
        try:
            for number in range(10):
                large[:] = number
                heap.checkpoint_in_background().wait()
        finally:
            ended.set()

    run_together([change("one"), change("two"), save, collect])
    del large
    heap.close()
    for checkpoint in repository.checkpoints("names"):
        with pagemark.SavedHeap(repository, "names", at=checkpoint.sequence) as saved:
            threads = [name.split()[0] for name in saved]
            assert threads in (["large"], ["large", "one"], ["large", "two"], ["large", "one", "two"])
            for name in saved.names()[1:]:
                assert not any(saved[name])


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_threads_take_checkpoints_by_one_job(tmp_path: Path) -> None:
    repository = pagemark.Repository(tmp_path / "repository")
    target = subprocess.Popen(["sleep", "600"])
    taken: list[pagemark.Checkpoint] = []
    try:
        job = pagemark.Job(target.pid, repository, "sleeper", memory_only=True)

        def work() -> None:
            for _ in range(5):
                taken.append(job.checkpoint())

        run_together([work, work, work, collect])
        assert sorted(checkpoint.sequence for checkpoint in taken) == list(range(1, 16))
        assert set(repository.checkpoints("sleeper")) == set(taken)

        def until_it_is_detached() -> None:
            with pytest.raises(ValueError, match="detached"):
                while True:
                    job.checkpoint()

        run_together([until_it_is_detached, until_it_is_detached, job.detach, job.detach, collect])
        assert target.poll() is None
    finally:
        target.kill()
        target.wait()
