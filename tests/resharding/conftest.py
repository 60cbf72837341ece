"""Messages of these tests are small, and are to have several parts all the same."""

from collections.abc import Iterator

import pytest

from megatron_rl.resharding import views


@pytest.fixture(scope="module", autouse=True)
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "PART_BYTES", 1024)
        yield
