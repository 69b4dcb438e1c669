import pickle
import subprocess
import sys
from pathlib import Path

import numpy
import pagemark
import pytest

PAGE = pagemark.PAGE_SIZE
REPLICA = Path(__file__).parents[3] / "examples" / "python" / "replica.py"


def test_a_commit_returns_old_and_new_content(mechanism: str) -> None:
    region = pagemark.Region(8 * PAGE, mechanism)
    view = memoryview(region)
    view[5000:5003] = b"old"
    region.begin()
    view[5000:5003] = b"new"
    changes = region.commit_changes()
    assert not region.in_transaction
    assert len(changes) == len(list(changes)) == len(changes.offsets) == 1
    change, part = changes[0], changes.offsets[0]
    assert changes[-1] == change and part == range(change.offset, change.offset + len(change.new))
    assert change.new == bytes(view[part.start : part.stop])
    assert change.old is not None and len(change.old) == len(part)
    at = 5000 - change.offset
    assert change.new[at : at + 3] == b"new" and change.old[at : at + 3] == b"old"
    for beyond in (1, -2):
        with pytest.raises(IndexError, match="1 changes"):
            changes[beyond]
    assert list(changes) == [change]
    assert "1 range" in repr(changes) and "Change of" in repr(change)
    with pytest.raises(pagemark.TransactionError, match="begin first"):
        region.commit_changes()


def test_changes_are_applied_and_reverted(mechanism: str) -> None:
    region, replica = (pagemark.Region(8 * PAGE, mechanism) for _ in range(2))
    array = numpy.frombuffer(region, dtype=numpy.uint8)
    copy = numpy.frombuffer(replica, dtype=numpy.uint8)
    with region.transaction(changes=True) as transaction:
        assert transaction.changes is None
        array[PAGE - 5 : PAGE + 5] = 7
        array[-1] = 8
    changes = transaction.changes
    assert changes is not None and transaction.written == changes.offsets
    assert changes.region_bytes == 8 * PAGE and changes.has_old
    changes.apply(replica)
    assert numpy.array_equal(array, copy) and array[-1] == 8
    changes.revert(replica)
    assert not copy.any()
    received = pickle.loads(pickle.dumps(changes))
    assert received == changes == pagemark.Changes(changes.encode())
    received.apply(replica)
    assert numpy.array_equal(array, copy)
    small = changes.without_old()
    assert not small.has_old and small[0].old is None and len(small.encode()) < len(changes.encode())
    with pytest.raises(pagemark.TransactionError, match="no content to restore"):
        small.revert(replica)
    with pytest.raises(pagemark.SnapshotError, match="of a region of 32768 bytes"):
        changes.apply(pagemark.Region(PAGE))


def test_a_rollback_has_no_changes() -> None:
    region = pagemark.Region(PAGE)
    with pytest.raises(RuntimeError), region.transaction(changes=True) as transaction:
        memoryview(region)[0] = 1
        raise RuntimeError
    assert transaction.changes is None and transaction.written is not None
    with region.transaction() as transaction:
        memoryview(region)[0] = 1
    assert transaction.changes is None


def test_a_region_without_rollback_has_no_old_content() -> None:
    region = pagemark.Region(PAGE, rollback=False)
    memoryview(region)[7] = 1
    with region.transaction(changes=True) as transaction:
        pass
    changes = transaction.changes
    assert changes is not None and changes[0].old is None
    assert changes[0].new[7] == 1, "what was written since the last transaction"


def test_damaged_changes_are_refused() -> None:
    region = pagemark.Region(PAGE)
    with region.transaction(changes=True) as transaction:
        memoryview(region)[0] = 1
    assert transaction.changes is not None
    encoded = transaction.changes.encode()
    for damaged in (b"", encoded[:-1], encoded[:50] + b"x" + encoded[51:]):
        with pytest.raises(ValueError, match="damaged"):
            pagemark.Changes(damaged)


@pytest.mark.parametrize("killed_after", [1, 17, 150, 299])
def test_a_backup_goes_on_where_the_primary_was_killed(killed_after: int) -> None:
    def final(*arguments: str) -> str:
        command = [sys.executable, str(REPLICA), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    expected = "300 transfers, 2000000 in all, accounts b5fa238b7f4723c4\n"
    assert final(str(killed_after)) == expected
