"""Saving, resuming and exporting, over real ranks."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.errors import BackendError, ConfigError, DataError
from megatron_rl.run_directory import LAYOUT
from megatron_rl.trainer import state
from megatron_rl.trainer.rank_batch import split
from megatron_rl.trainer.worker import Worker
from tests.tiny import GRID
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_batch, make_config, make_rollouts, start, write_checkpoint

LENGTHS, PROMPTS = [11, 23, 20, 5], [3, 7, 4, 2]
SCHEDULES = {1: (((0, 1), (2, 3)),), 2: (((0, 1),), ((2, 3),))}


def train(worker: Worker, steps: range) -> list[dict[str, float]]:
    dp = worker.topology.dp
    out = []
    for i in steps:
        batch = make_batch(make_rollouts(LENGTHS, PROMPTS, seed=i), (SCHEDULES[dp],), seed=i)
        part = split(batch, dp)[worker.topology.coordinates(worker.rank).dp]
        if worker.reference is not None:
            # An honest batch: the reference's log-probabilities, of this rank's samples.
            answer = worker.logprobs(part)
            assert answer is not None
            part = type(part)(part.schedule, part.rollouts, part.places, part.advantages, answer)
        out.append(worker.update(part))
        torch.rand(3)  # nothing here draws numbers; what does has to find them where they were
        with tensor_parallel.get_cuda_rng_tracker().fork():
            torch.rand(5)
    return out


def everything(worker: Worker) -> dict[str, Any]:
    """Weights and all of the resumable state."""
    saved = state.rank_state(worker.optimizer, worker.scheduler)
    return {
        "weights": {name: t.clone() for name, t in worker.tensors.items()},
        "optimizer": [
            None if s is None else ([p.clone() for p in s["parameters"]], s["inner"]["state"])
            for s in saved["optimizers"]
        ],
        "scheduler": saved["scheduler"],
        "random": saved["random"],
        "updates": worker.updates,
        "reference": worker.reference,
    }


def straight(rank: int, directory: str, config: Any, meeting: str) -> Any:
    worker = start(rank, config, directory, meeting)
    metrics = train(worker, range(4))
    return metrics, everything(worker)


def first_half(rank: int, directory: str, config: Any, meeting: str, checkpoint: str) -> None:
    worker = start(rank, config, directory, meeting)
    train(worker, range(2))
    worker.save(checkpoint)


def second_half(rank: int, directory: str, config: Any, meeting: str, checkpoint: str) -> Any:
    worker = Worker(config, rank, directory)
    worker.build(meeting)
    worker.load(checkpoint)
    steps = [value["step"] for o in worker.optimizer.chained_optimizers for value in o.optimizer.state.values()]
    distinct = len({s.data_ptr() for s in steps}) == len(steps)
    metrics = train(worker, range(2, 4))
    return metrics, everything(worker), distinct


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Bit for bit."""
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


RESUMED = [
    pytest.param("deepseek_v3", {"ep": 2}, 2, "bfloat16", True, {"kl_coef": 0.01}, id="deepseek_v3-ep2-bf16-reference"),
    pytest.param("qwen3_moe", {"tp": 2, "sp": True, "ep": 2}, 2, "float32", True, {}, id="qwen3_moe-tp2_ep2-fp32"),
    pytest.param(
        "qwen3_moe", {"pp": 2, "vpp": 2}, 2, "bfloat16", False, {}, id="qwen3_moe-pp2_vpp2-bf16-undistributed"
    ),
    pytest.param(
        "deepseek_v3", {}, 1, "float32", True, {"decay": "cosine", "warmup_steps": 2}, id="deepseek_v3-cosine"
    ),
]


@pytest.mark.parametrize(("family", "parallel", "world_size", "dtype", "distributed", "algorithm"), RESUMED)
def test_resumed_run_equals_one_that_never_stopped(
    family: str, parallel: dict, world_size: int, dtype: str, distributed: bool, algorithm: dict, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "hf", family, dtype=dtype)
    config = make_config(
        parallel, world_size=world_size, dtype=dtype, distributed_optimizer=distributed, algorithm=algorithm
    )
    (tmp_path / "checkpoint").mkdir()
    meetings = [f"file://{tmp_path}/meeting{i}" for i in range(3)]

    expected = run_ranks(world_size, straight, directory, config, meetings[0])
    run_ranks(world_size, first_half, directory, config, meetings[1], str(tmp_path / "checkpoint"))
    resumed = run_ranks(world_size, second_half, directory, config, meetings[2], str(tmp_path / "checkpoint"))

    for rank in range(world_size):
        assert_equal(resumed[rank][0], expected[rank][0][2:], f"metrics of rank {rank}")
        assert_equal(resumed[rank][1], expected[rank][1], f"rank {rank}")
        # torch's AdamW under megatron's own loading shares one step counter, which then counts once per parameter.
        assert resumed[rank][2], "two parameters share one step counter"


def test_a_reference_that_was_never_frozen_is_not_made_up(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "qwen3_moe")
    (tmp_path / "checkpoint").mkdir()
    run_ranks(1, first_half, directory, make_config(), f"file://{tmp_path}/meeting0", str(tmp_path / "checkpoint"))
    config = make_config(algorithm={"kl_coef": 0.1})
    with pytest.raises(ConfigError, match=r"holds no reference weights: .*kl_coef=0.*another name"):
        run_ranks(1, second_half, directory, config, f"file://{tmp_path}/meeting1", str(tmp_path / "checkpoint"))


def test_the_run_directory_compares_what_a_checkpoint_s_layout_is() -> None:
    """It refuses before the ranks start; both have to name the same keys."""
    keys = state.layout_of(make_config({})).keys()

    assert {key if key.startswith("trainer.") else key.partition(".")[0] for key in keys} == set(LAYOUT)


def test_other_layout_is_refused_with_what_changed(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "qwen3_moe")
    (tmp_path / "checkpoint").mkdir()
    run_ranks(1, first_half, directory, make_config(), f"file://{tmp_path}/meeting0", str(tmp_path / "checkpoint"))
    config = make_config({"ep": 2}, world_size=2)
    with pytest.raises(ConfigError, match=r"parallel\.ep was 1, is 2, trainer\.world_size was 1, is 2"):
        run_ranks(2, second_half, directory, config, f"file://{tmp_path}/meeting1", str(tmp_path / "checkpoint"))


def weights_elsewhere(rank: int, directory: str, config: Any, meeting: str, checkpoint: str, out: str) -> None:
    worker = start(rank, config, directory, meeting)
    with torch.no_grad():
        for tensor in worker.tensors.values():
            tensor.fill_(torch.nan)
    state.load_weights(Path(checkpoint) / "weights", worker.chunks)
    worker.export(out)


EXPORTED = {
    "one": (1, {}),
    "tp2_ep2": (2, {"tp": 2, "sp": True, "ep": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2_etp2": (2, {"cp": 2, "etp": 2}),
    "tp2_pp2_ep2": (4, {"tp": 2, "sp": True, "pp": 2, "ep": 2}),
    "tp2_pp2": (4, {"tp": 2, "sp": True, "pp": 2}),
}
EXPORTS = [
    *((family, name) for family in GRID for name in EXPORTED if name != "tp2_pp2"),
    *((family, "tp2_ep2") for family in ("mixtral", "qwen2_moe")),
    *((family, "tp2_pp2") for family in ("llama", "qwen2", "qwen3")),
]


def export(rank: int, directory: str, config: Any, meeting: str, out: str) -> None:
    start(rank, config, directory, meeting).export(out)


def export_with_little_room(rank: int, *args: Any) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    with pytest.raises(BackendError) as caught:
        export(rank, *args)
    return str(caught.value)


def test_a_disk_that_refuses_the_export_is_named_with_what_is_kept(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "qwen3_moe")
    meeting, out = f"file://{tmp_path}/meeting", tmp_path / "out"
    out.mkdir()

    (message,) = run_ranks(1, export_with_little_room, directory, make_config(), meeting, str(out))

    assert f"could not be exported to {out} (" in message and "File too large" in message
    assert "exported from the last checkpoint" in message


@pytest.mark.parametrize(("family", "name"), EXPORTS)
def test_export_before_training_is_what_was_imported(family: str, name: str, tmp_path: Path) -> None:
    world_size, parallel = EXPORTED[name]
    directory = write_checkpoint(tmp_path / "hf", family, dtype="bfloat16")
    config = make_config(parallel, world_size=world_size, dtype="bfloat16")
    out = tmp_path / "out"
    out.mkdir()

    run_ranks(world_size, export, directory, config, f"file://{tmp_path}/meeting", str(out))

    assert_equal(load_file(out / "model.safetensors"), load_file(Path(directory) / "model.safetensors"))
    assert {p.name for p in out.iterdir()} == {p.name for p in Path(directory).iterdir()}
    assert json.loads((out / "config.json").read_text()) == json.loads((Path(directory) / "config.json").read_text())


TP2, PP2_VPP2 = {"tp": 2, "sp": True}, {"pp": 2, "vpp": 2}


@pytest.mark.parametrize(
    ("family", "saved_on", "loaded_on"),
    [(family, {**TP2, "ep": 2}, PP2_VPP2) for family in GRID] + [("qwen2", PP2_VPP2, TP2), ("qwen2", TP2, PP2_VPP2)],
)
def test_saved_weights_load_on_another_layout(family: str, saved_on: dict, loaded_on: dict, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", family)
    checkpoint, out, before = tmp_path / "checkpoint", tmp_path / "out", tmp_path / "before"
    for path in (checkpoint, out, before):
        path.mkdir()
    config = make_config(saved_on, world_size=2)
    run_ranks(2, first_half_and_export, directory, config, f"file://{tmp_path}/m0", str(checkpoint), str(before))
    config = make_config(loaded_on, world_size=2)
    run_ranks(2, weights_elsewhere, directory, config, f"file://{tmp_path}/m1", str(checkpoint), str(out))

    assert_equal(load_file(out / "model.safetensors"), load_file(before / "model.safetensors"))


def first_half_and_export(rank: int, directory: str, config: Any, meeting: str, checkpoint: str, out: str) -> None:
    worker = start(rank, config, directory, meeting)
    train(worker, range(2))
    worker.save(checkpoint)
    worker.export(out)


def save_on_small_disk(rank: int, directory: str, config: Any, meeting: str, checkpoint: str, limit: int) -> None:
    worker = start(rank, config, directory, meeting)
    train(worker, range(1))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # as a full disk: writing fails with an OSError
    worker.save(checkpoint)


@pytest.mark.parametrize("limit", [1000, 800_000], ids=["weights", "optimizer"])
def test_failing_disk_at_save_is_a_backend_error(limit: int, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "qwen3_moe")
    (tmp_path / "checkpoint").mkdir()
    config = make_config({"ep": 2}, world_size=2)
    arguments = (directory, config, f"file://{tmp_path}/meeting", str(tmp_path / "checkpoint"), limit)
    with pytest.raises(BackendError, match="Free space there"):
        run_ranks(2, save_on_small_disk, *arguments)


def test_a_rank_file_that_was_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step_000003" / "rank-0.pt"
    path.parent.mkdir()
    torch.save({"updates": 3, "reference": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])

    with pytest.raises(DataError, match=r"rank-0\.pt is damaged \(RuntimeError.*Remove the directory .*step_000003:"):
        state.read(path)


def test_a_router_bias_that_was_cast_is_refused_and_not_cast_back(tmp_path: Path) -> None:
    directory, name = (
        write_checkpoint(tmp_path / "hf", "deepseek_v3"),
        "model.layers.1.mlp.gate.e_score_correction_bias",
    )
    path = Path(directory) / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].bfloat16()}, path, metadata={"format": "pt"})

    with pytest.raises(
        DataError, match=rf"{name} in .* is bfloat16, and the model keeps it in float32: .*Take it from"
    ):
        run_ranks(1, start, make_config(), directory, f"file://{tmp_path}/meeting")
