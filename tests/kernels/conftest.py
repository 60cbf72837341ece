"""Tests of kernels run in Triton's interpreter, in a process of their own: it is chosen when Triton is imported."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from tests.kernels import interpreter

    interpreter.mend()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.get_closest_marker("interpreted") and not INTERPRETED]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
