import copy
import gc
import mmap
import pickle
import subprocess
import sys
import weakref
from typing import Any

import numpy
import pagemark
import pytest

PAGE = pagemark.PAGE_SIZE


def test_an_empty_array_is_over_a_region_of_its_own(mechanism: str) -> None:
    table = pagemark.empty((1000, 3), "f4", mechanism)
    assert table.shape == (1000, 3) and table.dtype == numpy.float32 and not table.any()
    region = pagemark.region_of(table[5:, 1])
    assert len(region) == 3 * PAGE and region.mechanism == mechanism
    with region.transaction() as transaction:
        table[999, 2] = 1
    assert transaction.written is not None
    assert any(4 * 2999 in part for part in transaction.written)
    region.begin()
    table[:] = 7
    region.rollback()
    assert table[999, 2] == 1 and table[0, 0] == 0


def test_arrays_have_any_shape_and_most_types() -> None:
    assert pagemark.empty(5).dtype == numpy.float64
    assert pagemark.empty((), "i8").shape == ()
    assert pagemark.empty((3, 0), "i8").size == 0
    pairs = pagemark.empty(4, [("a", "u1"), ("b", "f8")])
    pairs["b"] = 2
    assert pairs["b"].sum() == 8
    with pytest.raises(ValueError, match="negative"):
        pagemark.empty((2, -1))
    with pytest.raises(ValueError, match="objects"):
        pagemark.empty(2, object)
    region = pagemark.Region(PAGE)
    assert pagemark.region_of(numpy.frombuffer(region, dtype=numpy.uint8)[9:]) is region
    with pytest.raises(ValueError, match="not over a region"):
        pagemark.region_of(numpy.zeros(3))


def test_an_array_keeps_its_region() -> None:
    table = pagemark.empty(1000)
    region = pagemark.region_of(table)
    part = table[10:]
    del table
    with pytest.raises(BufferError, match="views"):
        region.close()
    part[:] = 1
    del part
    region.close()


def test_the_package_works_without_numpy() -> None:
    program = """
import sys
sys.modules["numpy"] = None
from pagemark import *
import pagemark
with Region(1).transaction() as transaction: pass
try:
    pagemark.empty
except ModuleNotFoundError:
    print(len(transaction.written))
"""
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "0\n"
    with pytest.raises(AttributeError, match="full"):
        getattr(pagemark, "full")


def test_written_ranges_are_an_array_without_a_copy() -> None:
    region = pagemark.Region(64 * PAGE)
    array = numpy.frombuffer(region, dtype=numpy.uint8)
    region.begin()
    array[0] = array[9 * PAGE] = array[10 * PAGE] = 1
    written = region.commit()
    expected = [range(PAGE), range(9 * PAGE, 11 * PAGE)]
    assert written == expected and list(written) == expected and written != expected[:1]
    assert len(written) == 2 and written[-1] == written[1] == expected[1]
    assert written.total_bytes == 3 * PAGE and repr(written) == repr(expected)
    for beyond in (2, -3):
        with pytest.raises(IndexError, match="2 ranges"):
            written[beyond]
    pairs = numpy.asarray(written)
    assert pairs.dtype == numpy.int64 and not pairs.flags.owndata and not pairs.flags.writeable
    assert pairs.tolist() == [[0, PAGE], [9 * PAGE, 11 * PAGE]]
    view = memoryview(written)
    assert view.readonly and view.shape == (2, 2) and view.format == "q"
    assert bytes(view) == pairs.tobytes()
    del written
    gc.collect()
    assert pairs[1, 1] == 11 * PAGE, "a view keeps the ranges"
    region.begin()
    none = numpy.asarray(region.commit())
    assert none.shape == (0, 2)


def test_a_snapshot_is_a_read_only_buffer() -> None:
    table = pagemark.empty(5 * PAGE // 8, "i8")
    region = pagemark.region_of(table)
    table[:] = numpy.arange(len(table))
    snapshot = region.snapshot()
    table[:] = 0
    past = numpy.frombuffer(snapshot, dtype="i8")
    other = numpy.frombuffer(snapshot, dtype="i8")
    assert (past == numpy.arange(len(table))).all() and not past.flags.writeable
    assert past.ctypes.data == other.ctypes.data, "views share one copy"
    with pytest.raises(TypeError):
        memoryview(snapshot)[0] = 1
    del snapshot, other
    gc.collect()
    assert past[-1] == len(past) - 1, "a view keeps the content"


def test_snapshots_are_pickled() -> None:
    region = pagemark.Region(100 * PAGE)
    memoryview(region)[7 * PAGE] = 9
    snapshot = region.snapshot()
    encoded = pickle.dumps(snapshot)
    assert len(encoded) < 2 * PAGE, "zeros take no place"
    received = pickle.loads(encoded)
    assert received.read(7 * PAGE, 2) == b"\x09\x00" and len(received) == 100 * PAGE
    assert received != snapshot, "of another store"
    store = pagemark.Store()
    first, second = (pagemark.Snapshot(snapshot.encode(), store=store) for _ in range(2))
    assert first == second and first.diff(second) == []
    made = pagemark.Region.from_snapshot(received)
    assert bytes(memoryview(made)) == bytes(memoryview(region))
    with pytest.raises(pagemark.SnapshotError, match="another region"):
        made.restore(received)
    for damaged in (b"", snapshot.encode()[:-1]):
        with pytest.raises(ValueError, match="damaged"):
            pagemark.Snapshot(damaged)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_each_protocol_pickles_the_whole_content(protocol: int) -> None:
    region = pagemark.Region(4 * PAGE)
    with region.transaction(changes=True) as transaction:
        memoryview(region)[PAGE + 3] = 9
    received = pickle.loads(pickle.dumps(region.snapshot(), protocol))
    assert received.read(0, len(received)) == bytes(memoryview(region))
    assert pickle.loads(pickle.dumps(transaction.changes, protocol)) == transaction.changes


def test_a_copy_of_a_snapshot_is_the_snapshot() -> None:
    region = pagemark.Region(4 * PAGE)
    snapshot = region.snapshot()
    with region.transaction(changes=True) as transaction:
        memoryview(region)[0] = 1
    for copied in (copy.copy(snapshot), copy.deepcopy({"state": [snapshot]})["state"][0]):
        assert copied == snapshot and hash(copied) == hash(snapshot)
        region.restore(copied)
        assert memoryview(region)[0] == 0
    changes = transaction.changes
    assert copy.copy(changes) == copy.deepcopy(changes) == changes


def test_damaged_pickles_are_errors() -> None:
    region = pagemark.Region(3 * PAGE)
    memoryview(region)[PAGE] = 9
    encoded = region.snapshot().encode()
    pickled = pickle.dumps(region.snapshot())
    start = pickled.index(encoded)
    for at in range(start, start + len(encoded), 13):
        damaged = bytearray(pickled)
        damaged[at] ^= 0x10
        with pytest.raises(ValueError, match="damaged|of version"):
            pickle.loads(damaged)
    # What is no snapshot: other types, and bytes with a right checksum that claim anything.
    for other in ("text", None, 7, [1, 2], b"PMSNAPSH" + bytes(48)):
        with pytest.raises((TypeError, ValueError)):
            pagemark.Snapshot(other)  # type: ignore[arg-type]


def test_weak_references_end_with_their_objects() -> None:
    region = pagemark.Region(PAGE)
    with region.transaction(changes=True) as transaction:
        memoryview(region)[0] = 1
    store = pagemark.Store()
    things = [region, transaction, transaction.written, transaction.changes, region.snapshot(), store]
    references = [weakref.ref(thing) for thing in things]
    assert [reference() for reference in references] == things
    del region, transaction, store
    things.clear()
    gc.collect()
    assert all(reference() is None for reference in references)
    cache: weakref.WeakKeyDictionary[pagemark.Snapshot, str] = weakref.WeakKeyDictionary()
    snapshot = pagemark.Region(PAGE).snapshot()
    cache[snapshot] = "kept"
    assert cache[snapshot] == "kept"
    del snapshot
    gc.collect()
    assert not cache


def test_an_array_that_is_no_view_stays_usable() -> None:
    region = pagemark.Region(4096)
    # NumPy releases the view, and keeps the object.
    buffer: Any = region
    array = numpy.ndarray((4096,), numpy.uint8, buffer=buffer)
    array[7] = 5
    region.close()
    assert region.closed
    del region, buffer
    array[8] = array[7]
    assert array[8] == 5


def test_an_array_that_is_no_view_stays_usable_over_a_snapshot() -> None:
    region = pagemark.Region(4 << 20)
    memoryview(region)[7] = 5
    snapshot = region.snapshot()
    buffer: Any = snapshot
    array = numpy.ndarray((4 << 20,), numpy.uint8, buffer=buffer)
    again = numpy.frombuffer(buffer, numpy.uint8)
    assert array.ctypes.data == again.ctypes.data
    del snapshot, buffer, again
    region.close()
    gc.collect()
    assert array[7] == 5 and int(array.sum()) == 5


def test_an_array_that_is_no_view_keeps_adopted_memory() -> None:
    memory = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region = pagemark.Region.adopt(memory)
    region.close()
    # Nobody had the address of the region.
    region = pagemark.Region.adopt(memory)
    buffer: Any = region
    array = numpy.ndarray((4 << 20,), numpy.uint8, buffer=buffer)
    array[7] = 5
    region.close()
    with pytest.raises(BufferError):
        memory.close()
    assert array[7] == memory[7] == 5
    del array, region, buffer
    memory.close()
