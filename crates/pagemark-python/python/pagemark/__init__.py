"""Regions of memory with transactions and snapshots, and checkpoints of processes.

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

``region.save(repository, job)`` makes a region durable. A ``Job`` takes checkpoints of another
process and its descendants, and ``restore`` restores them.
"""

from ._native import *
from ._native import __all__ as __all__
