"""Regions of memory with transactions and snapshots, saved heaps, and checkpoints of processes.

The written pages of a region are found by the kernel's page tables, so that NumPy, and anything
else that takes a buffer, works in it at full speed:

>>> import numpy, pagemark
>>> region = pagemark.Region(1 << 20)
>>> array = numpy.frombuffer(region, dtype=numpy.int64)
>>> with region.transaction() as transaction:
...     array[0] = 42
>>> any(0 in written for written in transaction.written)
True
>>> before = region.snapshot()
>>> array[:] = 7
>>> restored = region.restore(before)
>>> int(array[0]), int(array[1])
(42, 0)

``region.save(repository, job)`` makes a region durable. A ``SavedHeap`` holds named arrays and
buffers that survive the program. A ``Job`` takes checkpoints of another
process and its descendants, and ``restore`` restores them.

``empty(shape, dtype)`` makes an array over a region, and ``region_of(array)`` returns the region:

>>> table = pagemark.empty((1000, 4), "f8")
>>> with pagemark.region_of(table).transaction():
...     table[0] = 1.5

These two functions and the arrays of a ``SavedHeap`` need NumPy, and so does nothing else in the
package.
"""

from typing import TYPE_CHECKING

from ._native import *
from ._native import __all__ as __all__

# Not in __all__: `from pagemark import *` works without NumPy.
if TYPE_CHECKING:
    from .arrays import empty as empty
    from .arrays import region_of as region_of


def __getattr__(name: str) -> object:
    if name in ("empty", "region_of"):
        # When first asked for: NumPy may be missing, and takes time to import.
        from . import arrays

        globals()[name] = getattr(arrays, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
