"""Heat that spreads over a plate: a stencil in NumPy that continues after it was killed.

The grids and the number of the step lie in a region, which is saved to a repository after every
20th step. A run that finds a checkpoint there continues from it. A save writes only the pages that
changed since the previous save.

    python stencil.py REPOSITORY [STEPS]
"""

import sys

import numpy
import pagemark

SIDE = 256
STEPS_A_SAVE = 20
JOB = "stencil"

repository = pagemark.Repository(sys.argv[1])
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 200

if JOB in repository.jobs():
    region = pagemark.Region.open(repository, JOB, rollback=False)
else:
    region = pagemark.Region(pagemark.PAGE_SIZE + 2 * SIDE * SIDE * 8, rollback=False)

# The first page holds the number of the step. Each of the two grids begins on a page of its own.
step = numpy.frombuffer(region, dtype=numpy.int64, count=1)
grids = numpy.frombuffer(region, dtype=numpy.float64, offset=pagemark.PAGE_SIZE).reshape(2, SIDE, SIDE)
if step[0] == 0:
    # One edge of the plate is hot.
    grids[:, 0, :] = 100.0
print(f"begins at step {step[0]}", flush=True)

while step[0] < steps:
    old, new = grids[step[0] % 2], grids[(step[0] + 1) % 2]
    new[1:-1, 1:-1] = (old[:-2, 1:-1] + old[2:, 1:-1] + old[1:-1, :-2] + old[1:-1, 2:]) / 4
    step[0] += 1
    if step[0] % STEPS_A_SAVE == 0:
        region.save(repository, JOB)
        print(f"step {step[0]} is saved", flush=True)

print(f"after {step[0]} steps the plate holds {grids[step[0] % 2].sum():.9f}")
