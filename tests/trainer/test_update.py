"""Updates and log-probability passes over real ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.errors import BackendError
from megatron_rl.trainer.rank_batch import RankBatch, micro_batches, split
from megatron_rl.trainer.worker import Worker
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import gradients_of, make_batch, make_config, make_rollouts, start, write_checkpoint

LENGTHS, PROMPTS = [11, 23, 20, 5, 40, 9], [3, 7, 4, 2, 1, 5]
TWO_MINI_BATCHES = {
    1: ((((0, 1), (2,)),), (((3, 4), (5,)),)),
    2: ((((0,),), ((1, 2),)), (((3,),), ((4, 5),))),
}


def part_of(worker: Worker, batch: Any) -> RankBatch:
    return split(batch, worker.topology.dp)[worker.topology.coordinates(worker.rank).dp]


def with_logprobs(part: RankBatch, logprobs: Any) -> RankBatch:
    return RankBatch(part.schedule, part.rollouts, part.places, part.advantages, logprobs)


def refused(rank: int, directory: str, config: Any, meeting: str, advantage: float) -> Any:
    worker = start(rank, config, directory, meeting)
    before = {name: t.clone() for name, t in worker.tensors.items()}
    batch = make_batch(make_rollouts(LENGTHS, PROMPTS), TWO_MINI_BATCHES[worker.topology.dp])
    batch.advantages[4] = advantage
    try:
        worker.update(part_of(worker, batch))
    except BackendError as error:
        same = all(torch.equal(t, before[name]) for name, t in worker.tensors.items())
        return str(error), worker.updates, same
    return None


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        (np.nan, "The loss of optimizer step 2 is nan"),
        (-np.inf, "The loss of optimizer step 2 is inf"),
        # Its square, summed for the norm, is beyond float32.
        (1e30, "The gradient norm of optimizer step 2 is inf"),
    ],
)
@pytest.mark.parametrize("parallel", [{"ep": 2}, {"pp": 2}], ids=["ep2", "pp2"])
def test_update_that_is_not_finite_is_refused_on_every_rank(
    advantage: float, message: str, parallel: dict, tmp_path: Path
) -> None:
    """The first mini-batch is sound and is applied; the second is refused before it touches a weight."""
    directory = write_checkpoint(tmp_path / "hf", "qwen3_moe")
    config = make_config(parallel, world_size=2, algorithm={"mini_batches": 2, "lr": 0.0})
    for text, updates, same in run_ranks(2, refused, directory, config, f"file://{tmp_path}/meeting", advantage):
        assert message in text and "no weight was changed" in text
        assert updates == 1
        assert same  # with lr=0 the first update changed nothing either


def old_and_reference(rank: int, directory: str, config: Any, meeting: str) -> Any:
    worker = start(rank, config, directory, meeting)
    batch = make_batch(make_rollouts(LENGTHS, PROMPTS), TWO_MINI_BATCHES[worker.topology.dp])
    part = part_of(worker, batch)
    first = worker.logprobs(part)
    metrics = worker.update(with_logprobs(part, first)) if worker.config.trainer.world_size == 1 else None
    before = {name: t.clone() for name, t in worker.tensors.items()}
    second = worker.logprobs(part)
    assert all(torch.equal(t, before[name]) for name, t in worker.tensors.items())  # not those of the reference
    return first, metrics, second, worker.topology.coordinates(rank)


def test_old_logprobs_follow_the_weights_and_the_reference_does_not(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "deepseek_v3")
    config = make_config(algorithm={"mini_batches": 2, "kl_coef": 0.1})
    ((first, metrics, second, _),) = run_ranks(1, old_and_reference, directory, config, f"file://{tmp_path}/meeting")

    np.testing.assert_array_equal(first.old, first.reference)
    assert len(first.old) == sum(LENGTHS) - sum(PROMPTS)
    np.testing.assert_array_equal(second.reference, first.reference)
    assert np.abs(second.old - first.old).max() > 1e-3  # two optimizer steps at 1e-3
    rollouts = make_rollouts(LENGTHS, PROMPTS)
    reported = np.concatenate([rollouts.row(i)[1][p:] for i, p in enumerate(PROMPTS)])
    # The two mini-batches count alike, whatever their tokens.
    split_at = sum(n - p for n, p in zip(LENGTHS[:3], PROMPTS[:3], strict=True))
    differences = np.abs(first.old - reported)
    expected = (differences[:split_at].mean() + differences[split_at:].mean()) / 2
    assert metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(expected, rel=1e-5)
    assert metrics["tokens"] == len(first.old)


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(2, {"cp": 2}), (2, {"pp": 2}), (2, {"tp": 2, "sp": True}), (2, {"ep": 2}), (4, {"cp": 2, "pp": 2})],
)
def test_logprobs_of_a_layout_are_those_of_one_rank(world_size: int, parallel: dict, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "qwen3_moe")
    algorithm = {"mini_batches": 2, "kl_coef": 0.1}
    one = make_config(algorithm=algorithm)
    ((expected, *_),) = run_ranks(1, old_and_reference, directory, one, f"file://{tmp_path}/one")
    many = make_config(parallel, world_size=world_size, algorithm=algorithm)
    results = run_ranks(world_size, old_and_reference, directory, many, f"file://{tmp_path}/many")

    parts = {at.dp: first for first, _, _, at in results if first is not None}
    found = in_order([parts[dp].old for dp in sorted(parts)], dp=len(parts))
    np.testing.assert_allclose(found, expected.old, atol=2e-5)  # log-probs near -4, float32
    for part in parts.values():
        np.testing.assert_array_equal(part.reference, part.old)


def in_order(parts: list[np.ndarray], *, dp: int) -> np.ndarray:
    """What the data-parallel ranks hold, in the order of the samples."""
    sizes = [n - p for n, p in zip(LENGTHS, PROMPTS, strict=True)]
    out = {}
    for rank, part in enumerate(parts):
        samples = [i for mini in TWO_MINI_BATCHES[dp] for micro in mini[rank] for i in micro]
        pieces = np.split(part, np.cumsum([sizes[i] for i in samples])[:-1])
        out |= dict(zip(samples, pieces, strict=True))
    return np.concatenate([out[i] for i in sorted(out)])


def three_updates(rank: int, directory: str, config: Any, meeting: str, phase: str) -> Any:
    worker = start(rank, config, directory, meeting, phase)
    batch = make_batch(make_rollouts(LENGTHS, PROMPTS), TWO_MINI_BATCHES[worker.topology.dp][:1])
    return [worker.update(part_of(worker, batch)) for _ in range(3)]


@pytest.mark.parametrize("phase", ["sft", "rl"])
@pytest.mark.parametrize(
    ("world_size", "parallel", "distributed"),
    [(2, {}, True), (2, {"ep": 2}, True), (2, {"ep": 2}, False), (2, {"pp": 2, "vpp": 2}, True)],
)
def test_training_over_ranks_goes_as_on_one(
    phase: str, world_size: int, parallel: dict, distributed: bool, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "hf", "deepseek_v3")
    one = make_config(distributed_optimizer=False)
    (expected,) = run_ranks(1, three_updates, directory, one, f"file://{tmp_path}/one", phase)
    many = make_config(parallel, world_size=world_size, distributed_optimizer=distributed)
    results = run_ranks(world_size, three_updates, directory, many, f"file://{tmp_path}/many", phase)

    for step, (found, want) in enumerate(zip(results[-1], expected, strict=True)):
        # Adam's first steps divide a gradient by its own size: where it is nearly 0, rounding moves a weight by lr.
        assert found == {name: pytest.approx(value, rel=1e-3, abs=1e-6) for name, value in want.items()}, step
    assert phase == "rl" or expected[2]["loss"] < expected[0]["loss"]


def copies_after_updates(rank: int, directory: str, config: Any, meeting: str) -> Any:
    worker = start(rank, config, directory, meeting)
    batch = make_batch(make_rollouts(LENGTHS, PROMPTS), TWO_MINI_BATCHES[worker.topology.dp][:1])
    metrics = [worker.update(part_of(worker, batch)) for _ in range(3)]
    return metrics, [t.clone() for name, t in worker.tensors.items() if name.endswith(TIED)]


TIED = ("word_embeddings.weight", "output_layer.weight")


@pytest.mark.parametrize("distributed", [True, False])
def test_tied_embeddings_on_two_stages_are_trained_as_one(distributed: bool, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "qwen2")
    one = make_config(distributed_optimizer=False)
    two = make_config({"pp": 2}, world_size=2, distributed_optimizer=distributed)

    (want, (embedding,)), *_ = run_ranks(1, copies_after_updates, directory, one, f"file://{tmp_path}/one")
    results = run_ranks(2, copies_after_updates, directory, two, f"file://{tmp_path}/two")

    (_, (first,)), (found, (last,)) = results
    assert torch.equal(first, last)
    # As in the test above. The norm would be larger if the copy's gradient counted twice.
    assert found == [{name: pytest.approx(value, rel=1e-3, abs=1e-6) for name, value in step.items()} for step in want]
    assert float((first - embedding).norm()) <= 1e-3 * float(embedding.norm())


def test_warm_up_and_decay_give_the_learning_rate_of_each_step(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "qwen3_moe")
    config = make_config(algorithm={"lr": 8e-4, "min_lr": 0.0, "warmup_steps": 2, "decay": "linear"})  # of 8 steps
    (metrics,) = run_ranks(1, three_updates, directory, config, f"file://{tmp_path}/meeting", "rl")
    assert [m["lr"] for m in metrics] == pytest.approx([4e-4, 8e-4, 8e-4 * 5 / 6])


def phase_of(rank: int, directory: str, config: Any, meeting: str) -> str:
    return start(rank, config, directory, meeting).phase


def test_a_phase_without_steps_needs_no_warm_up(tmp_path: Path) -> None:
    """steps=0 evaluates and exports, also of an experiment that warms up."""
    directory = write_checkpoint(tmp_path / "hf", "qwen3_moe")
    config = replace(make_config(algorithm={"warmup_steps": 2}), steps=0)
    assert run_ranks(1, phase_of, directory, config, f"file://{tmp_path}/meeting") == ["rl"]


def second_phase(rank: int, directory: str, config: Any, meeting: str, out: str) -> Any:
    """A supervised phase, an export, then one policy update."""
    worker = start(rank, config, directory, meeting, "sft")
    part = part_of(worker, make_batch(make_rollouts(LENGTHS, PROMPTS), TWO_MINI_BATCHES[worker.topology.dp]))
    worker.update(part)
    worker.export(out)
    worker.begin("rl")
    return worker.update(part), {name: t.clone() for name, t in worker.tensors.items()}


def only_phase(rank: int, directory: str, config: Any, meeting: str) -> Any:
    worker = start(rank, config, directory, meeting)
    part = part_of(worker, make_batch(make_rollouts(LENGTHS, PROMPTS), TWO_MINI_BATCHES[worker.topology.dp]))
    return worker.update(part), {name: t.clone() for name, t in worker.tensors.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_phase_starts_anew_from_the_weights_of_the_first(dtype: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "deepseek_v3", dtype=dtype)
    config = make_config({"ep": 2}, world_size=2, dtype=dtype, algorithm={"mini_batches": 2})
    out = tmp_path / "out"
    out.mkdir()

    found = run_ranks(2, second_phase, directory, config, f"file://{tmp_path}/m0", str(out))
    expected = run_ranks(2, only_phase, str(out), config, f"file://{tmp_path}/m1")

    for (metrics, tensors), (want, wanted) in zip(found, expected, strict=True):
        assert metrics == want
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def recomputed(rank: int, directory: str, config: Any, meeting: str) -> dict[str, torch.Tensor]:
    worker = start(rank, config, directory, meeting)
    batch = make_batch(make_rollouts(LENGTHS, PROMPTS), TWO_MINI_BATCHES[worker.topology.dp])
    (rows, *_) = micro_batches(part_of(worker, batch))
    worker.gradients(rows)
    return gradients_of(worker)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_recomputed_layers_have_the_gradients_of_kept_ones(family: str, tmp_path: Path) -> None:
    """As the large experiments ask for it; bit for bit: the same operations on the same numbers."""
    directory = write_checkpoint(tmp_path / "hf", family)
    options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    kept, again = (
        run_ranks(
            4,
            recomputed,
            directory,
            make_config({"tp": 2, "sp": True, "ep": 2, "pp": 2}, world_size=4, megatron=megatron),
            f"file://{tmp_path}/meeting-{len(megatron)}",
        )
        for megatron in ({}, options)
    )

    for before, after in zip(kept, again, strict=True):
        assert before.keys() == after.keys() and before
        assert all(torch.equal(before[name], after[name]) for name in before)
