from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pagemark
import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "python" / "counts.py"
CAPACITY = 64 << 20


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[pagemark.Repository]:
    repository = pagemark.Repository(tmp_path / "repository")
    try:
        pagemark.SavedHeap(repository, "probe", capacity_bytes=CAPACITY).close()
    except pagemark.MechanismError as error:
        pytest.skip(str(error))
    yield repository


def open_heap(
    repository: pagemark.Repository, *, parts: int = 1, version: int = 0, at: int | None = None
) -> pagemark.SavedHeap:
    return pagemark.SavedHeap(repository, "data", capacity_bytes=CAPACITY, parts=parts, version=version, at=at)


def test_arrays_and_buffers_are_there_in_the_next_program(repository: pagemark.Repository) -> None:
    heap = open_heap(repository)
    assert len(heap) == 0 and "table" not in heap
    table = heap.array("table", (100, 3), "f4")
    assert table.shape == (100, 3) and not table.any()
    table[7] = [1, 2, 3]
    text = heap.buffer("text", 11)
    text[:] = b"hello world"
    people = heap.array("people", 5, [("name", "U10"), ("age", "<i4")])
    people[4] = ("Ada", 36)
    heap.array("none", (0, 4), "i8")
    first = heap.checkpoint()
    assert (first.job, first.sequence) == ("data", 1) and first.written_bytes > 0
    table[7, 0] = 9
    assert heap.checkpoint().sequence == 2
    # It is not saved.
    table[8] = 1
    del table, text, people
    heap.close()
    assert heap.closed

    with open_heap(repository) as heap:
        assert heap.names() == ["none", "people", "table", "text"] == list(heap) and len(heap) == 4
        assert heap["table"][7].tolist() == [9, 2, 3] and not heap["table"][8].any()
        assert bytes(heap["text"]) == bytes(heap.buffer("text", 11)) == b"hello world"
        assert heap.array("people")[4].tolist() == ("Ada", 36) and heap["none"].shape == (0, 4)
        assert heap.array("table", (100, 3), "f4").dtype == numpy.float32
    with open_heap(repository, at=1) as heap:
        assert heap["table"][7].tolist() == [1, 2, 3]
        # It becomes the newest one.
        assert heap.checkpoint().sequence == 3


def test_what_is_asked_for_must_be_there(repository: pagemark.Repository) -> None:
    heap = open_heap(repository)
    heap.array("table", 10, "f8")
    heap.buffer("text", 10)
    with pytest.raises(KeyError, match="nothing"):
        heap.array("nothing")
    with pytest.raises(KeyError, match="nothing"):
        heap.buffer("nothing")
    with pytest.raises(KeyError, match="nothing"):
        heap["nothing"]
    with pytest.raises(KeyError, match="nothing"):
        del heap["nothing"]
    others: list[tuple[int | tuple[int, int], str | None, str]] = [
        (11, "f8", "shape"),
        (10, "f4", "data type"),
        ((2, 5), None, "shape"),
    ]
    for shape, dtype, reason in others:
        with pytest.raises(ValueError, match=reason):
            heap.array("table", shape, dtype)
    with pytest.raises(ValueError, match="buffer"):
        heap.array("text", 10, "u1")
    with pytest.raises(ValueError, match="10 bytes, not 11"):
        heap.buffer("text", 11)
    with pytest.raises(ValueError, match="objects"):
        heap.array("objects", 10, object)
    with pytest.raises(ValueError, match="negative"):
        heap.array("negative", -1, "f8")
    with pytest.raises(MemoryError):
        heap.array("large", CAPACITY, "f8")
    assert heap.names() == ["table", "text"]
    # An array is a buffer of its bytes.
    assert len(heap.buffer("table")) == 80


def test_memory_is_freed_by_name_and_used_again(repository: pagemark.Repository) -> None:
    heap = open_heap(repository)
    for number in range(20):
        # All of them together are more than the capacity.
        array = heap.array(f"large {number}", CAPACITY // 16, "f4")
        assert not array.any()
        array[:] = number
        with pytest.raises(BufferError, match="1 views"):
            del heap[f"large {number}"]
        del array
        del heap[f"large {number}"]
    heap.array("a", 10)
    heap.array("b", 10)
    heap.array("c", 10)
    del heap["b"]
    heap.checkpoint()
    heap.close()
    assert open_heap(repository).names() == ["a", "c"]


def test_views_keep_the_heap(repository: pagemark.Repository) -> None:
    heap = open_heap(repository)
    part = heap.array("table", 1000, "i8")[10:20]
    with pytest.raises(BufferError, match="1 views of"):
        heap.close()
    part[:] = 5
    assert heap["table"][10:20].sum() == 50
    del part
    buffer = heap.buffer("text", 5)
    holder = buffer.obj
    assert isinstance(holder, pagemark.HeapBuffer) and (holder.name, len(holder)) == ("text", 5)
    del buffer
    # An array may have the memory of the holder without a view of it.
    with pytest.raises(BufferError, match='1 views of "text"'):
        del heap["text"]
    with pytest.raises(BufferError, match='1 views of "text"'):
        heap.close()
    memoryview(holder)[0] = 7
    assert heap["text"][0] == 7
    del holder
    del heap["text"]
    heap.buffer("text", 5)
    heap.close()
    for use in [heap.checkpoint, heap.names, heap.checkpoint_in_background]:
        with pytest.raises(ValueError, match="closed"):
            use()


def test_an_array_that_is_no_view_keeps_the_heap(repository: pagemark.Repository) -> None:
    heap = open_heap(repository)
    buffer: Any = heap.buffer("table", 4096).obj
    # NumPy releases the view, and keeps the object.
    array = numpy.ndarray((4096,), numpy.uint8, buffer=buffer)
    del buffer
    array[7] = 5
    with pytest.raises(BufferError, match='1 views of "table"'):
        del heap["table"]
    # Something else that had the memory would be overwritten.
    other = heap.array("other", 4096, "u1")
    array[:] = 5
    assert not other.any() and heap["table"][7] == 5
    del other
    with pytest.raises(BufferError, match='1 views of "table"'):
        heap.close()
    array[8] = array[7]
    assert heap["table"][8] == 5
    del array
    heap.close()


def test_a_checkpoint_goes_on_in_the_background(repository: pagemark.Repository) -> None:
    heap = open_heap(repository)
    table = heap.array("table", 1 << 20, "u1")
    heap.checkpoint()
    table[:] = 1
    saving = heap.checkpoint_in_background()
    # The copy was taken before.
    table[:] = 2
    taken = saving.wait()
    assert taken.sequence == 2 and saving.done
    with pytest.raises(ValueError, match="already"):
        saving.wait()
    del table
    heap.close()
    assert (open_heap(repository)["table"] == 1).all()


def test_another_heap_is_refused(repository: pagemark.Repository) -> None:
    with open_heap(repository, version=1, parts=4) as heap:
        heap.array("table", 10)
        heap.checkpoint()
        # It is mapped already.
        with pytest.raises(pagemark.HeapError, match="taken"):
            open_heap(repository, version=1, parts=4)
    with pytest.raises(pagemark.HeapError, match="version"):
        open_heap(repository, version=2, parts=4)
    with pytest.raises(pagemark.HeapError, match="4 parts"):
        open_heap(repository, version=1)
    with pytest.raises(ValueError, match="parts"):
        open_heap(repository, parts=3)
    with pytest.raises(pagemark.RepositoryError):
        open_heap(repository, at=9, version=1, parts=4)
    region = pagemark.Region(4096)
    region.save(repository, "region")
    with pytest.raises(pagemark.HeapError, match="no heap"):
        pagemark.SavedHeap(repository, "region")


def test_a_child_does_not_have_the_heap(repository: pagemark.Repository) -> None:
    heap = open_heap(repository)
    heap.array("table", 10)
    child = os.fork()
    if child == 0:
        try:
            heap.checkpoint()
        except pagemark.ForkedError:
            os._exit(42)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert heap.checkpoint().sequence == 1


def test_no_call_of_a_child_touches_the_heap(repository: pagemark.Repository) -> None:
    heap = open_heap(repository)
    buffer = heap.buffer("table", 100).obj
    calls: list[Callable[[], object]] = [
        heap.checkpoint,
        lambda: "table" in heap,
        lambda: heap["table"],
        lambda: heap.__delitem__("table"),
        lambda: heap.buffer("other", 10),
        lambda: heap.array("array", 10, "i4"),
    ]
    for number, call in enumerate(calls):
        child = os.fork()
        if child == 0:
            try:
                call()
            except pagemark.ForkedError:
                os._exit(42)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42, number
    child = os.fork()
    if child == 0:
        try:
            memoryview(buffer)
        except ValueError:
            os._exit(42)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


@pytest.mark.parametrize("damage", ["data", "long data", "name", "long name", "next", "twice", "outside"])
def test_what_others_have_made_of_a_heap_is_checked(repository: pagemark.Repository, damage: str) -> None:
    heap = open_heap(repository)
    heap.buffer("x", 100)
    heap.buffer("y", 100)
    with open("/proc/self/maps") as maps:
        place = next(line for line in maps if "pagemark-heap" in line and line.split()[1].startswith("rw"))
    start, end = (int(part, 16) for part in place.split()[0].split("-"))
    directory = start + ctypes.string_at(start, end - start).index(b"pmnames1")
    (entry,) = struct.unpack("Q", ctypes.string_at(directory + 8, 8))
    following, data, data_bytes, name_bytes, _ = struct.unpack("5Q", ctypes.string_at(entry, 40))
    assert (data_bytes, name_bytes) == (100, 1)
    victim = b"an immutable object of Python"
    changed = {
        "data": (8, id(victim)),
        "long data": (16, 1 << 20),
        "name": (24, 1 << 40),
        "long name": (24, (1 << 64) - 41),
        "next": (0, entry),
        "twice": (8, directory),
        "outside": (0, following + 8),
    }
    offset, value = changed[damage]
    ctypes.memmove(entry + offset, struct.pack("Q", value), 8)
    heap.checkpoint()
    heap.close()
    with pytest.raises(pagemark.HeapError, match="damaged"):
        open_heap(repository)


def test_the_example_is_killed_and_continues(tmp_path: Path) -> None:
    lines: list[str] = []
    for kills in range(4):
        command = [sys.executable, str(EXAMPLE), str(tmp_path / "repository")]
        lines.clear()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if "cannot be tracked" in line:
                    pytest.skip(line)
                lines.append(line)
                if len(lines) == 3 + kills:
                    # It is killed while it takes a checkpoint, or between two.
                    process.kill()
        assert lines[0].startswith("a new heap" if kills == 0 else "continues at word "), lines
    assert int(lines[0].split()[3]) > 0
