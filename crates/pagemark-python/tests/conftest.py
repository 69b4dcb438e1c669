import os
from collections.abc import Iterator

import pagemark
import pytest
from hypothesis import settings

# Without a database no files are left. An example that fails is printed.
settings.register_profile("pagemark", database=None, deadline=None, print_blob=True)
settings.load_profile("pagemark")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds skipped tests to the list that the test script collects."""
    log = os.environ.get("PAGEMARK_SKIP_LOG")
    if log and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        with open(log, "a") as file:
            file.write(f"skipped: {report.nodeid}: {reason}\n")


@pytest.fixture(params=[name for name in pagemark.MECHANISMS if name != "soft-dirty"])
def mechanism(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each mechanism that works here, except soft-dirty, which needs all threads to be stopped."""
    try:
        pagemark.Region(1, request.param).close()
    except pagemark.MechanismError as error:
        pytest.skip(str(error))
    yield request.param
