"""What threads may do with the same objects, with and without Python's global lock."""

import gc
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
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
