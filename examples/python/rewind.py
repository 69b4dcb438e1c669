"""The game of life in a region. Every generation is a snapshot, so that the program can go back to
an earlier generation, and recognizes a repeated state without comparing the cells.

    python rewind.py [MECHANISM]
"""

import sys

import numpy
import numpy.typing
import pagemark

SIDE = 512
mechanism = sys.argv[1] if len(sys.argv) > 1 else "auto"


def step(world: numpy.typing.NDArray[numpy.uint8]) -> None:
    """The next generation, in place, on a torus. Only cells that change are written."""
    shifts = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1) if (down, right) != (0, 0)]
    neighbours = sum(numpy.roll(world, shift, (0, 1)) for shift in shifts)
    following = (neighbours == 3) | ((world == 1) & (neighbours == 2))
    changes = following != world
    world[changes] = following[changes]


with pagemark.Region(SIDE * SIDE, mechanism) as region:
    world = numpy.frombuffer(region, dtype=numpy.uint8)[: SIDE * SIDE].reshape(SIDE, SIDE)
    # A blinker and a toad, each of period 2, and a pulsar of period 3: the whole has period 6.
    world[100, 100:103] = 1
    world[200, 201:204] = world[201, 200:203] = 1
    for row in (2, 7, 9, 14):
        for column in (4, 5, 6, 10, 11, 12):
            world[300 + row, 300 + column] = world[300 + column, 300 + row] = 1

    seen: dict[pagemark.Snapshot, int] = {}
    history: list[pagemark.Snapshot] = []
    while (now := region.snapshot()) not in seen:
        seen[now] = len(history)
        history.append(now)
        with region.transaction() as generation:
            step(world)
    print(f"generation {len(history)} is generation {seen[now]} again")
    changed = sum(len(part) for part in history[0].diff(history[1]))
    total = len(region)
    print(f"from the first generation to the second {changed} of {total} bytes lie in pages that differ")

    # A snapshot can be read without restoring it.
    past = numpy.frombuffer(history[1].read(0, SIDE * SIDE), dtype=numpy.uint8).reshape(SIDE, SIDE)
    print(f"{past.sum()} cells lived in generation 1")
    region.restore(history[1])
    assert (world == past).all()
    print("back in generation 1")

    # A generation that fails half way is rolled back.
    try:
        with region.transaction():
            world[:50] = 1
            raise RuntimeError("the power failed")
    except RuntimeError as error:
        is_unchanged = region.snapshot() == history[1]
        print(f"{error}: the region is {'unchanged' if is_unchanged else 'damaged'}")
    # A region cannot be closed while views of it exist.
    del world
