"""Arrays in saved heaps. This module needs NumPy; buffers in heaps do not."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

import numpy
import numpy.lib.format
import numpy.typing

from ._native import HeapBuffer

__all__: list[str] = []


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
    for size in sizes:
        if size < 0:
            raise ValueError(f"a dimension of {size} is negative")
    return sizes


def _parse(description: str) -> tuple[tuple[int, ...], numpy.dtype[Any]]:
    shape, kind = ast.literal_eval(description)
    return shape, numpy.lib.format.descr_to_dtype(kind)


def describe(shape: int | Sequence[int], dtype: numpy.typing.DTypeLike | None) -> tuple[str, int]:
    """The description of an array, as it is saved with it, and its size in bytes."""
    kind, sizes = numpy.dtype(dtype), _sizes(shape)
    if kind.hasobject:
        raise ValueError(f"a heap cannot hold objects of Python, as the data type {kind} does")
    return repr((sizes, numpy.lib.format.dtype_to_descr(kind))), math.prod(sizes) * kind.itemsize


def check(name: str, description: str, shape: int | Sequence[int] | None, dtype: numpy.typing.DTypeLike | None) -> None:
    """Raises ValueError unless the description is that of such an array."""
    if not description:
        raise ValueError(f"{name!r} is a buffer, not an array")
    sizes, kind = _parse(description)
    if shape is not None and _sizes(shape) != sizes:
        raise ValueError(f"the array {name!r} has the shape {sizes}, not {_sizes(shape)}")
    if dtype is not None and numpy.dtype(dtype) != kind:
        raise ValueError(f"the array {name!r} has the data type {kind}, not {numpy.dtype(dtype)}")


def array_over(view: HeapBuffer, description: str) -> numpy.typing.NDArray[Any]:
    """The array that lies in a buffer."""
    sizes, kind = _parse(description)
    if not len(view):
        return numpy.empty(sizes, kind)
    # Before Python 3.12, NumPy's types know only the buffers of the standard library.
    buffer: Any = view
    # An array that is made over the buffer itself would not count as a view of it.
    return numpy.ndarray(sizes, kind, buffer=numpy.frombuffer(buffer, numpy.uint8))
