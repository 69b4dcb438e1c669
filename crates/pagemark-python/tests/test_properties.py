"""Compares regions with a shadow copy under random programs."""

from __future__ import annotations

import numpy
import numpy.typing
import pagemark
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PAGES = 12
BYTES = PAGES * pagemark.PAGE_SIZE

Bytes = numpy.typing.NDArray[numpy.uint8]

writes = st.tuples(st.just("write"), st.integers(0, BYTES - 1), st.integers(1, 9000), st.integers(0, 255))
steps = st.one_of(
    writes,
    writes,
    st.tuples(st.sampled_from(["begin", "commit", "rollback", "snapshot"])),
    st.tuples(st.just("restore"), st.integers(0, 5)),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(steps, max_size=30))
def test_a_region_holds_what_a_shadow_copy_holds(mechanism: str, program: list[tuple[str, int, int, int]]) -> None:
    region = pagemark.Region(BYTES, mechanism)
    array = numpy.frombuffer(region, dtype=numpy.uint8)
    now: Bytes = numpy.zeros(BYTES, dtype=numpy.uint8)
    before: Bytes | None = None
    snapshots: list[tuple[pagemark.Snapshot, Bytes]] = []
    for step, *arguments in program:
        if step == "write":
            start, size, value = arguments
            array[start : start + size] = value
            now[start : start + size] = value
        elif step == "begin" and before is None:
            region.begin()
            before = now.copy()
        elif step == "commit" and before is not None:
            is_written = numpy.zeros(BYTES, dtype=bool)
            for part in region.commit():
                is_written[part.start : part.stop] = True
            assert is_written[now != before].all(), "a write was missed"
            before = None
        elif step == "rollback" and before is not None:
            region.rollback()
            now, before = before, None
        elif step == "snapshot":
            snapshots.append((region.snapshot(), now.copy()))
        elif step == "restore" and snapshots:
            snapshot, content = snapshots[arguments[0] % len(snapshots)]
            region.restore(snapshot)
            now = content.copy()
        assert numpy.array_equal(array, now), step
    for snapshot, content in snapshots:
        assert snapshot.read(0, BYTES) == content.tobytes()
        for other, other_content in snapshots:
            equal = numpy.array_equal(content, other_content)
            assert (snapshot == other) == equal
            assert (snapshot.diff(other) == []) == equal
