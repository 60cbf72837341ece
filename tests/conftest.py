"""Which tests share a process when several run side by side."""

from pathlib import Path

import pytest

PACKAGES = ("program", "rollout")
"""Their tests share servers and finished runs. They take longest, so they come first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def package(item: pytest.Item) -> str:
        return item.path.relative_to(Path(__file__).parent).parts[0]

    items.sort(key=lambda item: package(item) not in PACKAGES)
    for item in items:
        shared = package(item)
        item.add_marker(pytest.mark.xdist_group(shared if shared in PACKAGES else item.path.stem))
