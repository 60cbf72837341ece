"""The driver's handle over real actors."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file

from megatron_rl import cluster, pools
from megatron_rl.errors import BackendError, DataError
from megatron_rl.trainer.trainer import MegatronTrainer
from megatron_rl.trainer.worker import Worker
from megatron_rl.types import Batch
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_batch, make_config, make_rollouts, write_checkpoint

pytestmark = pytest.mark.live

SCHEDULE = ((((0, 1),), ((2, 3),)),)


@pytest.fixture(scope="module")
def pool() -> Iterator[pools.Pool]:
    cluster.start(address=None, cpus=2)
    yield pools.Pool("trainer", 2, cpus=1)
    cluster.stop()


def stored_batch(seed: int) -> Batch:
    """Four samples whose tokens lie in the object store, in two pieces."""
    pieces = [make_rollouts([11, 23], [3, 7], seed=seed), make_rollouts([20, 5], [4, 2], seed=seed + 1)]
    samples = [s for piece in pieces for s in make_batch(piece, ()).samples]
    references = [ray.put(piece) for piece in pieces]
    samples = [
        type(s)(s.prompt_id, s.group, references[i // 2], s.row, 0, 0, "stop", 0, 0.0) for i, s in enumerate(samples)
    ]
    return Batch(samples=tuple(samples), schedule=SCHEDULE, advantages=np.array([1, -1, 0.5, -0.5], np.float32))


def listeners() -> set[tuple[str, int]]:
    """Addresses and ports of this process."""
    return {tuple(c.laddr) for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def meet(rank: int, directory: str, config: Any, pipe: tuple[int, int]) -> str:
    worker = Worker(config, rank, directory)
    if rank == 0:
        before = listeners()  # which the process that was forked had open
        address = worker.address()
        assert [ip for ip, _ in listeners() - before] == ["127.0.0.1"]  # this machine is all there is
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", int(address.rpartition(":")[2])))  # another program that looks for a free port
        os.write(pipe[1], address.encode())
    else:
        address = os.read(pipe[0], 100).decode()
    worker.build(address)
    return address


def test_the_port_where_ranks_meet_cannot_be_taken_before_they_do(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "qwen3_moe")

    addresses = run_ranks(2, meet, directory, make_config({"ep": 2}, world_size=2), os.pipe())

    assert addresses[0] == addresses[1]


def test_trainer_trains_saves_resumes_exports_and_reports_a_dead_rank(pool: Any, tmp_path: Path) -> None:
    """One test: starting two actors takes most of its time."""
    directory = write_checkpoint(tmp_path / "hf", "deepseek_v3")
    config = make_config({"ep": 2}, world_size=2, algorithm={"kl_coef": 0.1})
    trainer = MegatronTrainer(config, Path(directory), pool=pool, logs=tmp_path)
    trainer.ready()
    trainer.begin("rl")

    batch = trainer.logprobs(stored_batch(0))
    assert [isinstance(r, ray.ObjectRef) for r in batch.logprobs] == [True, True]  # one for each data-parallel rank
    metrics = trainer.update(batch)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)  # the reference is still the policy
    assert metrics["tokens"] == 11 - 3 + 23 - 7 + 20 - 4 + 5 - 2

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    trainer.save(checkpoint)
    trainer.update(trainer.logprobs(stored_batch(2)))
    trainer.export(tmp_path / "first")
    trainer.load(checkpoint)
    trainer.update(trainer.logprobs(stored_batch(2)))
    trainer.export(tmp_path / "second")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)

    with pytest.raises(DataError, match="is no checkpoint of ours"):
        trainer.load(tmp_path / "nowhere")

    os.kill(ray.get(trainer._actors[1].pid.remote()), signal.SIGKILL)
    with pytest.raises(BackendError, match="trainer-1 died"):
        trainer.update(batch)
    trainer.stop()
