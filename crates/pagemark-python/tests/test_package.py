import doctest
import os
import subprocess
import sys
from pathlib import Path

import pagemark

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
    check([sys.executable, "-m", "mypy.stubtest", "pagemark"], tmp_path)


def test_programs_pass_the_type_checker() -> None:
    root = Path(__file__).parents[1]
    check([sys.executable, "-m", "mypy", f"--cache-dir={os.devnull}", "tests", str(EXAMPLES)], root)


def test_the_types_are_complete_and_programs_pass_pyright(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    pyright = [sys.executable, "-m", "basedpyright"]
    check([*pyright, "--verifytypes", "pagemark", "--ignoreexternal"], tmp_path)
    check([*pyright, "--level", "error", "--project", str(root), "tests", str(EXAMPLES)], root)


def check(command: list[str], directory: Path) -> None:
    # Pyright asks the first Python in PATH for the directories of packages.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    found = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
