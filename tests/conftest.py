"""Which tests run, and which share a process when several run side by side."""

import os
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

PACKAGES = ("program", "rollout")
"""Their tests share servers and finished runs. They take longest, so they come first."""

# torch asks the DNS who both ends of a connection are: without a server that answers, each time for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


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
