import numpy
import pagemark
import pytest

PAGE = pagemark.PAGE_SIZE


def test_snapshots_are_restored_read_compared_and_diffed(mechanism: str) -> None:
    region = pagemark.Region(50 * PAGE, mechanism)
    array = numpy.frombuffer(region, dtype=numpy.uint8)
    array[:] = numpy.arange(len(array)) % 251
    first = region.snapshot()
    assert len(first) == len(region)
    array[10 * PAGE + 5] = 255
    array[20 * PAGE : 21 * PAGE] = 255
    second = region.snapshot()
    assert first != second and not first == second
    assert first.diff(second) == [range(10 * PAGE, 11 * PAGE), range(20 * PAGE, 21 * PAGE)]
    assert first.diff(first) == []
    assert second.read(20 * PAGE - 1, 3) == bytes([(20 * PAGE - 1) % 251, 255, 255])
    assert first.read(5, 0) == b""

    restored = region.restore(first)
    assert restored == first.diff(second), "only the differing chunks"
    assert numpy.array_equal(array, numpy.arange(len(array)) % 251)
    assert region.snapshot() == first
    region.restore(second)
    assert array[10 * PAGE + 5] == 255


def test_equal_content_is_an_equal_key() -> None:
    store = pagemark.Store()
    regions = [pagemark.Region(4 * PAGE, store=store) for _ in range(2)]
    for region in regions:
        memoryview(region)[3] = 5
    a, b = (region.snapshot() for region in regions)
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    with pytest.raises(pagemark.SnapshotError, match="another region"):
        regions[0].restore(b)
    assert store.usage().chunks == 1
    memoryview(regions[0])[3] = 6
    assert regions[0].snapshot() not in {a}
    assert a != "something else"


def test_free_memory_is_not_saved(mechanism: str) -> None:
    region = pagemark.Region(4 * PAGE, mechanism)
    array = numpy.frombuffer(region, dtype=numpy.uint8)
    array[:] = 5
    snapshot = region.snapshot(without=[range(3 * PAGE, 4 * PAGE), range(100, PAGE)])
    assert snapshot.read(99, 2) == bytes([5, 0])
    assert snapshot.read(PAGE - 1, 2) == bytes([0, 5])
    assert snapshot.read(3 * PAGE - 1, 2) == bytes([5, 0])
    assert array[100] == 5, "the region is unchanged"
    for bad in ([range(-1, 5)], [range(0, 10, 2)]):
        with pytest.raises(ValueError):
            region.snapshot(without=bad)
    with pytest.raises(IndexError, match="not within"):
        region.snapshot(without=[range(5 * PAGE)])
    with pytest.raises(TypeError):
        region.snapshot(without=[5])  # type: ignore[list-item]


def test_foreign_snapshots_are_refused() -> None:
    region, other = pagemark.Region(PAGE), pagemark.Region(PAGE)
    mine, foreign = region.snapshot(), other.snapshot()
    memoryview(region)[5] = 1
    with pytest.raises(pagemark.SnapshotError, match="another region"):
        region.restore(foreign)
    assert memoryview(region)[5] == 1
    with pytest.raises(pagemark.SnapshotError, match="another store"):
        mine.diff(foreign)
    assert mine != foreign


def test_reading_beyond_the_end_is_refused() -> None:
    snapshot = pagemark.Region(PAGE).snapshot()
    for offset, size in ((PAGE, 1), (0, PAGE + 1), (0, 1 << 62), (1 << 63, 1), ((1 << 64) - 1, 1)):
        with pytest.raises(IndexError, match="not within"):
            snapshot.read(offset, size)
    assert snapshot.read(PAGE, 0) == b""


def test_a_budget_is_kept() -> None:
    store = pagemark.Store(budget_bytes=100_000)
    region = pagemark.Region(64 * PAGE, store=store)
    array = numpy.frombuffer(region, dtype=numpy.uint8)
    empty = region.snapshot()
    content = numpy.random.default_rng(1).integers(0, 256, len(array), dtype=numpy.uint8)
    array[:] = content
    region.begin()
    array[9] ^= 255
    with pytest.raises(pagemark.SnapshotError, match="budget"):
        region.snapshot()
    assert region.in_transaction and array[9] == content[9] ^ 255
    region.rollback()
    assert numpy.array_equal(array, content)
    region.restore(empty)
    assert not array.any()
    assert store.usage().held_bytes <= 100_000


def test_small_chunks_give_a_finer_difference() -> None:
    region = pagemark.Region(PAGE, store=pagemark.Store(chunk_bytes=256))
    before = region.snapshot()
    memoryview(region)[300] = 1
    assert before.diff(region.snapshot()) == [range(256, 512)]
    with pytest.raises(ValueError, match="power of two"):
        pagemark.Store(chunk_bytes=1000)
