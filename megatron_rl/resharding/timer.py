"""Seconds by stage."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timer(defaultdict[str, float]):
    """[stage] -> seconds so far."""

    def __init__(self) -> None:
        super().__init__(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add what the block takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self[stage] += time.perf_counter() - start
