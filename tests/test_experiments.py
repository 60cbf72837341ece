"""Every shipped experiment, with the published config.json of its model: it loads, can be cut as it says, and fits."""

import json
from functools import cache
from pathlib import Path

import pytest

from megatron_rl.arrangement import gpus_needed
from megatron_rl.checks import check
from megatron_rl.config import Config
from megatron_rl.config_loading import CONFIG_DIR, load_config
from megatron_rl.memory import states
from megatron_rl.run_plan import RunPlan, describe, plan_run
from tests.tiny import PUBLISHED

MODELS = {
    "deepseek_v3_32_nodes": "deepseek_v3",
    "kimi_k2_32_nodes": "kimi_k2",
    "qwen3_235b_a22b_16_nodes": "qwen3_235b_a22b",
    "qwen3_30b_a3b_1_node": "qwen3_30b_a3b",
    "qwen3_30b_a3b_2_nodes": "qwen3_30b_a3b",
}
"""The model of each experiment that asks for one."""
NODES = {
    "deepseek_v3_32_nodes": 32,
    "kimi_k2_32_nodes": 32,
    "qwen3_235b_a22b_16_nodes": 16,
    "qwen3_30b_a3b_1_node": 1,
    "qwen3_30b_a3b_2_nodes": 2,
}
EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))


def load(name: str, directory: Path) -> Config:
    """With everything that it leaves to the user."""
    if name not in MODELS:
        return load_config([f"experiment={name}"])
    (directory / "config.json").write_text(json.dumps(PUBLISHED[MODELS[name]]))
    (directory / "model.safetensors").touch()
    return load_config([f"experiment={name}", f"model.path={directory}", "data.path=prompts.jsonl"])


@cache
def planned(name: str, directory: Path) -> tuple[Config, RunPlan]:
    config = load(name, directory)
    return config, plan_run(config)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_can_work(name: str, directory: Path) -> None:
    check(load(name, directory))


@pytest.mark.parametrize("name", MODELS)
def test_it_takes_every_gpu_of_its_nodes_and_none_besides(name: str, directory: Path) -> None:
    config, plan = planned(name, directory)

    assert config.cluster.nodes == plan.nodes == NODES[name]
    assert (plan.trainer_gpus, plan.engine_gpus) == gpus_needed(config)
    assert plan.trainer_gpus + plan.engine_gpus == 8 * NODES[name]


@pytest.mark.parametrize("name", MODELS)
def test_its_memory_fits_with_room_for_what_is_only_estimated(name: str, directory: Path) -> None:
    config, plan = planned(name, directory)
    print(describe(config, plan))
    assert config.cluster.gpu_gb is not None

    assert len(plan.uses) == config.parallel.pp + 1
    for who, use in plan.uses.items():
        assert states(use) < 0.83 * config.cluster.gpu_gb * 1e9, who
        assert sum(use.values()) < 0.92 * config.cluster.gpu_gb * 1e9, who


@pytest.mark.parametrize("name", MODELS)
def test_its_sync_sends_every_rank_its_bytes_once(name: str, directory: Path) -> None:
    """Making the schedule compiles every rank's layout on both sides, and refuses an element without one source."""
    sync = planned(name, directory)[1].sync
    assert sync is not None

    assert sync.sent.sum() == sync.fetched.sum() == sync.least_network
    assert sync.fetched.sum() + sync.in_node.sum() == sync.least_received > 0


@pytest.mark.parametrize(
    ("name", "before", "nodes"), [("kimi_k2_32_nodes", "take 48: ", 48), ("deepseek_v3_32_nodes", "in FP8: ", 32)]
)
def test_it_fits_otherwise_too_as_its_comment_says(name: str, before: str, nodes: int, directory: Path) -> None:
    text = (CONFIG_DIR / "experiment" / f"{name}.yaml").read_text()
    words = text.partition(before)[2].partition("defaults:")[0].replace("#", " ").split()
    load(name, directory)
    config = load_config([f"experiment={name}", f"model.path={directory}", "data.path=x", *words])
    plan = plan_run(config, with_sync=False)

    check(config)
    assert len(words) >= 6 and plan.trainer_gpus + plan.engine_gpus == 8 * nodes
    assert max(sum(use.values()) for use in plan.uses.values()) < 0.92 * 85e9


def test_the_plan_says_what_the_run_takes(directory: Path) -> None:
    lines = describe(*planned("deepseek_v3_32_nodes", directory)).splitlines()

    assert lines[0] == "GPUs     192 for the trainer and 64 for engines, on 32 nodes of 8"
    assert lines[1] == "sbatch   --nodes=32 --gpus-per-node=8 --cpus-per-task=9 (at least)"
    assert lines[2] == "trainer  tp=8 pp=12 cp=1 ep=16 etp=1"
    assert lines[3] == "engines  engines=2 tp=32 ep=32 dp_attention=4"
    assert lines[-1] == "most: engine, 76.7 of 85 GB (90%)"
