"""Which tests run, and which share a process when several run side by side."""

from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

PACKAGES = ("program", "rollout")
"""Their tests share servers and finished runs. They take longest, so they come first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "network" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("network")]
    items.sort(key=lambda item: item.path.relative_to(Path(__file__).parent).parts[0] not in PACKAGES)


class Groups(LoadScopeScheduling):
    """A process takes a whole package, or a whole file, at a time."""

    def _split_scope(self, nodeid: str) -> str:
        _, package, *_ = path = nodeid.split("::")[0].split("/")
        return package if package in PACKAGES else "/".join(path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return Groups(config, log)
