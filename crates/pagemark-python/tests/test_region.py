import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

import numpy
import pagemark
import pytest

PAGE = pagemark.PAGE_SIZE


def covers(ranges: pagemark.Ranges, offset: int) -> bool:
    return any(offset in part for part in ranges)


def test_a_committed_transaction_reports_what_was_written(mechanism: str) -> None:
    region = pagemark.Region(100 * PAGE, mechanism)
    array = numpy.frombuffer(region, dtype=numpy.uint8)
    array[:] = 1
    with region.transaction() as transaction:
        assert region.in_transaction
        assert transaction.written is None
        array[5] = 2
        array[50 * PAGE] = 3
    assert not region.in_transaction
    assert array[5] == 2
    assert transaction.written is not None
    assert covers(transaction.written, 5) and covers(transaction.written, 50 * PAGE)
    assert mechanism == "full" or not covers(transaction.written, 20 * PAGE)


def test_an_exception_rolls_back_and_is_raised(mechanism: str) -> None:
    region = pagemark.Region(10 * PAGE, mechanism)
    array = numpy.frombuffer(region, dtype=numpy.int64)
    array[:] = numpy.arange(len(array))
    transaction = region.transaction()
    with pytest.raises(ZeroDivisionError):
        with transaction:
            array[::100] = -1
            print(1 // 0)
    assert not region.in_transaction
    assert transaction.written is not None and covers(transaction.written, 0)
    assert numpy.array_equal(array, numpy.arange(len(array)))


def test_a_transaction_can_be_rolled_back_within_its_block() -> None:
    region = pagemark.Region(PAGE)
    view = memoryview(region)
    with region.transaction() as transaction:
        view[0] = 1
        transaction.rollback()
        assert view[0] == 0
        view[1] = 1
        with pytest.raises(pagemark.TransactionError, match="not open"):
            transaction.rollback()
    assert view[0] == 0 and view[1] == 1, "writes after the rollback stay"


def test_a_transaction_object_is_used_once() -> None:
    region = pagemark.Region(PAGE)
    transaction = region.transaction()
    with transaction:
        pass
    with pytest.raises(pagemark.TransactionError, match="for each"):
        with transaction:
            pass
    assert not region.in_transaction


def test_without_rollback_an_exception_commits() -> None:
    region = pagemark.Region(PAGE, rollback=False)
    view = memoryview(region)
    with pytest.raises(KeyError):
        with region.transaction():
            view[0] = 1
            raise KeyError
    assert view[0] == 1 and not region.in_transaction
    region.begin()
    with pytest.raises(pagemark.TransactionError, match="without rollback"):
        region.rollback()
    region.commit()


def test_misuse_raises() -> None:
    region = pagemark.Region(PAGE)
    with pytest.raises(pagemark.TransactionError, match="call begin first"):
        region.commit()
    with pytest.raises(pagemark.TransactionError, match="call begin first"):
        region.rollback()
    region.begin()
    with pytest.raises(pagemark.TransactionError, match="do not nest"):
        region.begin()
    with pytest.raises(pagemark.TransactionError, match="do not nest"):
        with region.transaction():
            pass
    assert region.in_transaction
    region.rollback()
    with pytest.raises(ValueError, match="no mechanism is called guess"):
        pagemark.Region(PAGE, "guess")
    with pytest.raises(ValueError, match="at least one byte"):
        pagemark.Region(0)
    with pytest.raises(OverflowError):
        pagemark.Region(-1)
    with pytest.raises(OSError):
        pagemark.Region(1 << 62)
    for error in (pagemark.TransactionError, pagemark.MechanismError, pagemark.SnapshotError, pagemark.ForkedError):
        assert issubclass(error, pagemark.Error)


def test_a_mechanism_that_does_not_work_raises_an_error_with_the_reason() -> None:
    for name in pagemark.MECHANISMS:
        try:
            assert pagemark.Region(1, name).mechanism == name
        except pagemark.MechanismError as error:
            assert str(error).startswith(f"{name} does not work here: ")


def test_offsets_beyond_the_end_are_refused() -> None:
    region = pagemark.Region(2 * PAGE)
    for start, stop in ((0, 2 * PAGE + 1), (5, 4), (1 << 63, (1 << 63) + 1)):
        with pytest.raises(IndexError, match="not within"):
            region.discard(start, stop)
        with pytest.raises(IndexError, match="not within"):
            region.read_from(0, start, stop)


def test_discarded_memory_holds_zeros_and_comes_back(mechanism: str) -> None:
    region = pagemark.Region(4 * PAGE, mechanism)
    array = numpy.frombuffer(region, dtype=numpy.uint8)
    array[:] = 9
    region.begin()
    region.discard(PAGE // 2, 3 * PAGE)
    assert (array[PAGE : 3 * PAGE] == 0).all() and (array[:PAGE] == 9).all()
    region.rollback()
    assert (array == 9).all()


def test_a_file_is_read_into_a_region_with_every_mechanism(mechanism: str) -> None:
    region = pagemark.Region(4 * PAGE, mechanism)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as file, os.fdopen(writer, "wb", buffering=0) as sink:
        sink.write(b"abcdef")
        region.begin()
        assert region.read_from(file, PAGE - 2, PAGE + 1) == 3
        assert region.read_from(reader, PAGE + 1) == 3
        assert bytes(memoryview(region)[PAGE - 2 : PAGE + 4]) == b"abcdef"
        written = region.commit()
        assert covers(written, PAGE - 2) and covers(written, PAGE + 3)
    with pytest.raises(OSError) as bad:
        region.read_from(reader)
    assert bad.value.errno == 9
    with pytest.raises(ValueError, match="no file descriptor"):
        region.read_from(-1)
    with pytest.raises(AttributeError):
        region.read_from("a name")  # type: ignore[arg-type]


def test_the_interpreter_is_released_while_a_call_waits() -> None:
    region = pagemark.Region(PAGE)
    reader, writer = os.pipe()
    # If the call held the interpreter, this thread could not write what the call waits for.
    waiting = threading.Thread(target=region.read_from, args=(reader, 0, 1))
    waiting.start()
    os.write(writer, b"x")
    waiting.join()
    assert memoryview(region)[0] == ord("x")
    os.close(reader)
    os.close(writer)


def test_a_forked_child_is_refused() -> None:
    region = pagemark.Region(PAGE)
    view = memoryview(region)
    region.begin()
    view[0] = 1
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (region.begin, region.commit, region.rollback):
            try:
                call()
            except pagemark.ForkedError:
                refused += 1
        os._exit(0 if refused == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert region.in_transaction and view[0] == 1
    region.rollback()
    assert view[0] == 0, "the parent's transaction continues"


def test_system_calls_write_to_writable_parts(mechanism: str) -> None:
    region = pagemark.Region(4 * PAGE, mechanism)
    view = memoryview(region)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as file, os.fdopen(writer, "wb", buffering=0) as sink:
        region.begin()
        sink.write(b"abcdef")
        with region.writable(PAGE - 2, PAGE + 4):
            assert file.readinto(view[PAGE - 2 : PAGE + 4]) == 6
        assert bytes(view[PAGE - 2 : PAGE + 4]) == b"abcdef"
        written = region.commit()
        assert covers(written, PAGE - 2) and covers(written, PAGE + 3)
        whole = region.writable()
        with whole:
            with pytest.raises(ValueError, match="entered"):
                whole.__enter__()
            sink.write(b"x")
            assert file.readinto(view[3 * PAGE :]) == 1
        with whole:
            pass
    for start, stop in ((0, 4 * PAGE + 1), (5, 4)):
        with pytest.raises(IndexError, match="not within"):
            region.writable(start, stop).__enter__()
    view.release()
    with region.writable():
        region.close()
    with pytest.raises(ValueError, match="closed"):
        whole.__enter__()


def test_memory_is_adopted_and_given_back(mechanism: str) -> None:
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[5] = 7
    array = numpy.frombuffer(memory, dtype=numpy.int64)
    with pagemark.Region.adopt(array, mechanism) as region:
        assert len(region) == 4 * PAGE and region.mechanism == mechanism
        region.begin()
        memory[5] = 8
        array[1000] = 9
        assert memoryview(region)[5] == 8
        written = region.rollback()
        assert covers(written, 5) and covers(written, 8000)
        assert memory[5] == 7 and array[1000] == 0
        with pytest.raises(BufferError):
            memory.close()
    memory[5] = 10
    assert array[0] == 10 << 40
    del array
    # Somebody had the address of the memory from the region.
    with pytest.raises(BufferError):
        memory.close()
    del region
    memory.close()


def test_memory_that_cannot_be_adopted_raises() -> None:
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(memory)
    for unaligned in (view[1:], view[: PAGE + 1], view[:0]):
        with pytest.raises(ValueError, match="whole pages"):
            pagemark.Region.adopt(unaligned)
    for bad in (view.toreadonly(), view[:: 2 * PAGE]):
        with pytest.raises(BufferError, match="writable, contiguous"):
            pagemark.Region.adopt(bad)
    with pytest.raises(TypeError):
        pagemark.Region.adopt(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no mechanism is called guess"):
        pagemark.Region.adopt(view, "guess")
    region = pagemark.Region.adopt(view[:PAGE])
    with pytest.raises(pagemark.Error, match="overlaps"):
        pagemark.Region.adopt(view)
    region.close()
    pagemark.Region.adopt(view).close()


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_a_memmap_keeps_its_content(mechanism: str, mode: Literal["c", "r+"], tmp_path: Path) -> None:
    path = tmp_path / "array"
    before = numpy.arange(1, 8 * PAGE + 1, dtype=numpy.uint64).astype(numpy.uint8)
    path.write_bytes(before.tobytes())
    array = numpy.memmap(path, dtype=numpy.uint8, mode=mode)
    is_shared = mode == "r+"
    if is_shared and mechanism not in ("compare", "full"):
        with pytest.raises(ValueError, match="sole use"):
            pagemark.Region.adopt(array, mechanism)
    if (mechanism == "emulate" and is_shared) or mechanism == "uffd":
        # `uffd` tracks no mapping of a file, and `emulate` no shared one.
        with pytest.raises(pagemark.MechanismError):
            pagemark.Region.adopt(array, mechanism, sole_use=True)
        assert path.read_bytes() == before.tobytes()
        return
    with pagemark.Region.adopt(array, mechanism, sole_use=True) as region:
        region.begin()
        array[PAGE + 1] = 0
        array[5 * PAGE + 1] = 0
        written = region.rollback()
        assert covers(written, PAGE + 1) and covers(written, 5 * PAGE + 1)
        assert (array == before).all()
        assert path.read_bytes() == before.tobytes()
        region.begin()
        array[7] = 77
        assert covers(region.commit(), 7)
    expected = before.copy()
    expected[7] = 77
    assert (array == expected).all()
    assert path.read_bytes() == (expected if is_shared else before).tobytes()


def test_unmapped_memory_is_noticed(mechanism: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    region = pagemark.Region(8 * PAGE, mechanism)
    array = numpy.frombuffer(region, dtype=numpy.uint8)
    region.begin()
    array[0] = 1
    assert libc.munmap(ctypes.c_void_p(array.ctypes.data + 4 * PAGE), ctypes.c_size_t(PAGE)) == 0
    for call in (region.commit, region.rollback, region.snapshot):
        with pytest.raises(pagemark.Error, match="not mapped"):
            call()
    assert region.in_transaction and array[0] == 1
    # Freeing the region unmaps the hole too, which must not hold other memory by then.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
    libc.mmap.restype = ctypes.c_void_p
    hole = libc.mmap(ctypes.c_void_p(array.ctypes.data + 4 * PAGE), ctypes.c_size_t(PAGE), 3, flags, -1, 0)
    assert hole == array.ctypes.data + 4 * PAGE


def test_signal_handlers_write_in_a_transaction(mechanism: str) -> None:
    region = pagemark.Region(4 * PAGE, mechanism)
    view = memoryview(region)

    def outer(number: int, frame: object) -> None:
        view[PAGE] = 1
        signal.raise_signal(signal.SIGUSR2)

    def inner(number: int, frame: object) -> None:
        view[2 * PAGE] = 2

    before = signal.signal(signal.SIGUSR1, outer), signal.signal(signal.SIGUSR2, inner)
    try:
        region.begin()
        view[0] = 3
        signal.raise_signal(signal.SIGUSR1)
        assert [view[0], view[PAGE], view[2 * PAGE]] == [3, 1, 2]
        written = region.rollback()
    finally:
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGUSR2, before[1])
    assert all(covers(written, page * PAGE) for page in range(3))
    assert [view[0], view[PAGE], view[2 * PAGE]] == [0, 0, 0]


def test_a_crash_is_reported_by_the_previous_handler(mechanism: str) -> None:
    program = f"""
import ctypes, pagemark
region = pagemark.Region(2 * {PAGE}, {mechanism!r})
with region.transaction():
    memoryview(region)[5] = 1
    print("written", flush=True)
    ctypes.memset(8, 0, 1)
"""
    command = [sys.executable, "-X", "faulthandler", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGSEGV and ended.stdout == "written\n"
    assert "Fatal Python error: Segmentation fault" in ended.stderr and 'File "<string>", line 7' in ended.stderr


def test_threads_write_in_one_transaction(mechanism: str) -> None:
    region = pagemark.Region(64 * PAGE, mechanism)
    array = numpy.frombuffer(region, dtype=numpy.int64)

    def write(first: int) -> None:
        array[first::8] = first + 1

    for _ in range(3):
        before = array.copy()
        region.begin()
        threads = [threading.Thread(target=write, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(array.tolist()) == set(range(1, 9))
        region.rollback()
        assert numpy.array_equal(array, before)


def test_transactions_of_many_regions_are_independent() -> None:
    regions = [pagemark.Region(PAGE) for _ in range(20)]
    views = [memoryview(region) for region in regions]
    for region, view in zip(regions, views):
        region.begin()
        view[0] = 1
    for index, region in enumerate(regions):
        if index % 2:
            region.commit()
        else:
            region.rollback()
    assert [view[0] for view in views] == [0, 1] * 10


def test_content_that_was_undone_and_is_written_again_is_found(mechanism: str) -> None:
    """Content that is written again after a rollback or a restore counts as written."""
    region = pagemark.Region(PAGE, mechanism)
    view = memoryview(region)
    region.begin()
    view[0] = 1
    region.rollback()
    view[0] = 1
    region.begin()
    view[0] = 2
    region.rollback()
    assert view[0] == 1, "as it was when the transaction began"

    view[0] = 0
    empty = region.snapshot()
    for _ in range(2):
        view[0] = 1
        region.restore(empty)
        assert view[0] == 0
