"""Arrays over regions. This module needs NumPy; the rest of the package does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import numpy.typing

from ._native import Region, Store

__all__ = ["empty", "region_of"]


def empty(
    shape: int | Sequence[int],
    dtype: numpy.typing.DTypeLike = numpy.float64,
    mechanism: str = "auto",
    *,
    rollback: bool = True,
    store: Store | None = None,
) -> numpy.typing.NDArray[Any]:
    """An array over a new region, which `region_of` returns. It holds zeros.

    The other arguments are those of `Region`. Arrays of objects are refused, since a region holds
    bytes and not references.
    """
    kind = numpy.dtype(dtype)
    if kind.hasobject:
        raise ValueError(f"a region cannot hold objects of Python, as the data type {kind} does")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    count = 1
    for size in sizes:
        if size < 0:
            raise ValueError(f"a dimension of {size} is negative")
        count *= int(size)
    # A region has at least one byte.
    region = Region(max(count * kind.itemsize, 1), mechanism, rollback=rollback, store=store)
    # Before Python 3.12, NumPy's types know only the buffers of the standard library.
    buffer: Any = region
    # An array that is made over the region itself would not count as a view of it.
    return numpy.ndarray(sizes, kind, buffer=numpy.frombuffer(buffer, numpy.uint8))


def region_of(array: numpy.typing.NDArray[Any]) -> Region:
    """The region that holds the memory of an array, or of the array that it is a view of.

    Raises ValueError if the memory is not that of a region.
    """
    holder: object = array
    while not isinstance(holder, Region):
        if isinstance(holder, numpy.ndarray):
            holder = holder.base
        elif isinstance(holder, memoryview):
            holder = holder.obj
        else:
            raise ValueError("the array is not over a region: make it by pagemark.empty")
    return holder
