"""A server of each family that has none in the package's `engines`: its text, and a push into it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rollout.conftest import Engines
from tests.rollout.servers import assert_greedy_text_is_that_of_transformers, checkpoint, running, state_of
from tests.rollout.test_sync_live import push_all
from tests.trainer.ranks import run_ranks

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

TP2 = {"tp": 2, "sp": True}
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "glm4_moe": (1, {"pp": 2}),
    "kimi_k2": (1, {"ep": 2}),
    "llama": (1, TP2),
    "mixtral": (2, {"ep": 2}),
    "moonlight": (1, {**TP2, "ep": 2}),
    "qwen2": (2, {"pp": 2}),
    "qwen2_moe": (2, {**TP2, "ep": 2}),
    "qwen3": (1, TP2),
}
"""Family -> (ranks of its server, layout of the two trainer ranks that push into it)."""


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    family = request.param
    directory = tmp_path_factory.mktemp(family)
    path, other = (checkpoint(directory, family, dtype="float32", seed=seed) for seed in (1, 2))
    tp, _ = FAMILIES[family]
    with running(path, tp=tp, dtype="float32") as server:
        yield Engines(family, path, other, {tp: server})


@pytest.mark.parametrize("engine", FAMILIES, indirect=True)
def test_greedy_text_is_that_of_transformers(engine: Engines) -> None:
    (server,) = engine.servers.values()
    assert_greedy_text_is_that_of_transformers(server, engine.path)


@pytest.mark.parametrize("engine", FAMILIES, indirect=True)
def test_a_pushed_server_equals_one_that_loaded_the_export(engine: Engines, tmp_path: Path) -> None:
    ((tp, server),) = engine.servers.items()
    fresh, export = state_of(server), tmp_path / "export"
    export.mkdir()
    _, parallel = FAMILIES[engine.family]

    layout = 2, parallel, (f"tp{tp}",)
    results = run_ranks(2, push_all, engine, layout, f"file://{tmp_path}/meeting", export)

    exported, original = (load_file(path / "model.safetensors") for path in (export, engine.path))
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    ((between,), (after,)), metrics, _ = results[0][f"tp{tp}"]
    assert after == fresh
    for old, new in zip(fresh[0], between[0], strict=True):
        assert old.keys() == new.keys() and not set(old.items()) & set(new.items())
    assert between[1] != fresh[1]
    assert metrics["sync/bytes_received"] == metrics["sync/bytes_needed"] > 0
