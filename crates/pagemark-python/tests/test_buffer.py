import gc

import numpy
import pagemark
import pytest

PAGE = pagemark.PAGE_SIZE


def test_numpy_views_a_region_without_a_copy() -> None:
    region = pagemark.Region(1000)
    assert len(region) == PAGE, "whole pages"
    a = numpy.frombuffer(region, dtype=numpy.float64)
    b = numpy.frombuffer(region, dtype=numpy.uint8)
    assert a.nbytes == len(region) and a.flags.writeable and not a.flags.owndata
    assert a.ctypes.data == b.ctypes.data and a.ctypes.data % PAGE == 0
    a[0] = 1.5
    assert bytes(memoryview(region)[:8]) == numpy.float64(1.5).tobytes()
    assert (b[:8] == numpy.frombuffer(numpy.float64(1.5).tobytes(), dtype=numpy.uint8)).all()


def test_views_are_counted_and_closing_waits_for_them() -> None:
    region = pagemark.Region(PAGE)
    view = memoryview(region)
    array = numpy.frombuffer(region, dtype=numpy.uint8)
    part = array[10:20]
    with pytest.raises(BufferError, match="2 views"):
        region.close()
    assert not region.closed
    del array
    view.release()
    with pytest.raises(BufferError, match="1 views"):
        region.close()
    part[:] = 7
    assert memoryview(region)[10] == 7
    del part
    gc.collect()
    region.close()
    assert region.closed


def test_a_view_keeps_the_memory() -> None:
    array = numpy.frombuffer(pagemark.Region(PAGE), dtype=numpy.uint8)
    gc.collect()
    array[:] = 3
    assert int(array.sum()) == 3 * PAGE


def test_a_with_block_closes_a_region() -> None:
    with pagemark.Region(PAGE) as region:
        memoryview(region)[0] = 1
        gc.collect()
    assert region.closed
    region.close()


def test_a_closed_region_is_refused() -> None:
    region = pagemark.Region(PAGE)
    snapshot = region.snapshot()
    region.close()
    calls = (
        lambda: memoryview(region),
        lambda: len(region),
        lambda: region.granularity_bytes,
        lambda: region.in_transaction,
        region.begin,
        region.commit,
        region.rollback,
        region.snapshot,
        lambda: region.restore(snapshot),
        lambda: region.read_from(0),
        lambda: region.discard(0, 1),
        lambda: region.transaction().__enter__(),
    )
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()
    assert "closed" in repr(region)
    assert snapshot.read(0, 3) == bytes(3), "snapshots stay readable"


def test_a_view_can_be_read_only() -> None:
    view = memoryview(pagemark.Region(PAGE)).toreadonly()
    with pytest.raises(TypeError):
        view[0] = 1
