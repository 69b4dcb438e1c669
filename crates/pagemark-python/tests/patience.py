"""Waiting for what another program does."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Longer than any event that a test waits for takes on a busy machine: only a missing one fails.
PATIENCE_S = 600


def wait_until(event: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"timeout: {event}"
        time.sleep(0.01)
