import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pagemark

# A program that type checkers accept for each version of Python.
TYPED = """\
from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy
import numpy.typing
import pagemark


def written(region: pagemark.Region) -> int:
    with region.transaction(changes=True) as transaction:
        memoryview(region)[0] = 1
    assert transaction.changes is not None
    return sum(len(change.new) for change in transaction.changes)


def views(region: pagemark.Region, store: pagemark.Store) -> list[numpy.typing.NDArray[numpy.uint8]]:
    snapshot: pagemark.Snapshot = region.snapshot(without=[range(0, 1)])
    ranges: pagemark.Ranges = region.restore(pickle.loads(pickle.dumps(snapshot)))
    numbers: list[range] = [*ranges, ranges[0]]
    assert numbers and store.usage().chunks
    return [numpy.frombuffer(memoryview(buffer), numpy.uint8) for buffer in (region, snapshot, ranges)]


table: numpy.typing.NDArray[Any] = pagemark.empty((4, 2), "f8", rollback=False)
owner: pagemark.Region = pagemark.region_of(table)
adopted = pagemark.Region.adopt(bytearray(8192), sole_use=True)
saved: pagemark.Checkpoint = owner.save(pagemark.Repository(Path("there")), "job")
downtime: int | None = saved.cost and saved.cost.downtime_us
with pagemark.Region(4096) as region:
    region.begin()
    changes: pagemark.Changes = region.commit_changes()
    changes.apply(adopted)
"""

README = Path(__file__).parents[3] / "README.md"
OWN_MEMORY = Path(__file__).parents[3] / "docs" / "how-to" / "own-memory.md"
EXAMPLES = Path(__file__).parents[3] / "examples" / "python"

REWIND = """\
generation 6 is generation 0 again
from the first generation to the second 24576 of 262144 bytes lie in pages that differ
65 cells lived in generation 1
back in generation 1
the power failed: the region is unchanged
"""


def test_the_examples_of_the_documentation_work() -> None:
    assert doctest.testmod(pagemark).failed == 0


def test_public_names_are_documented() -> None:
    for name in pagemark.__all__:
        thing = getattr(pagemark, name)
        if isinstance(thing, type):
            assert thing.__doc__, name
            assert thing.__module__ == "pagemark", name
            for attribute, value in vars(thing).items():
                assert attribute.startswith("_") or value.__doc__, f"{name}.{attribute}"


def test_the_example_prints_its_results(mechanism: str) -> None:
    command = [sys.executable, str(EXAMPLES / "rewind.py"), mechanism]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == REWIND


def test_the_stubs_match_the_package(tmp_path: Path) -> None:
    # Before Python 3.12, a buffer has no such methods at run time.
    allowed = tmp_path / "allowed"
    allowed.write_text("" if sys.version_info >= (3, 12) else r"pagemark\._native\..*\.__(release_)?buffer__" + "\n")
    check([sys.executable, "-m", "mypy.stubtest", f"--allowlist={allowed}", "pagemark._native"], tmp_path)


def test_types_serve_the_version_of_python_that_runs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TYPED)
    check([sys.executable, "-m", "mypy", "--strict", f"--cache-dir={os.devnull}", str(program)], tmp_path)
    check([sys.executable, "-m", "basedpyright", "--level", "error", str(program)], tmp_path)
    check([sys.executable, "-m", "basedpyright", "--verifytypes", "pagemark", "--ignoreexternal"], tmp_path)


def test_the_documented_programs_pass_the_type_checkers(tmp_path: Path) -> None:
    # What the page on a program's own memory says in words, and its parts in Python. The README has one of them.
    before = "import numpy\nimport pagemark\n\npid = 1\n"
    after = "for part in transaction.written:\n    print(part.start)\n"
    parts, of_readme = (
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in (OWN_MEMORY, README)
    )
    assert len(parts) == 2 and of_readme == parts[:1]
    program = tmp_path / "program.py"
    program.write_text(before + "".join(parts) + after)
    check([sys.executable, "-m", "mypy", "--strict", f"--cache-dir={os.devnull}", str(program)], tmp_path)
    check([sys.executable, "-m", "basedpyright", "--level", "error", str(program)], tmp_path)


def test_programs_pass_the_type_checkers() -> None:
    root = Path(__file__).parents[1]
    programs = ["tests", str(EXAMPLES)]
    # Before Python 3.12, NumPy's types know only the buffers of the standard library.
    version = ".".join(map(str, max(sys.version_info[:2], (3, 12))))
    check([sys.executable, "-m", "mypy", f"--cache-dir={os.devnull}", f"--python-version={version}", *programs], root)
    pyright = [sys.executable, "-m", "basedpyright", "--level", "error", "--project", str(root)]
    check([*pyright, "--pythonversion", version, *programs], root)


def check(command: list[str], directory: Path) -> None:
    # Pyright asks the first Python in PATH for the directories of packages.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    found = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
