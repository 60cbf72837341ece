"""One arm of tools/bench_step.py: the update stage against a bare megatron-core step, in turns, in the same ranks.

Ours is what the controller calls: `MegatronTrainer.update`, with everything that Ray and our batches add. Bare is
tests/trainer/bare_megatron.py on the same micro-batches, packed beforehand.
Usage: python tools/bench_update.py SETTINGS_JSON OUT_JSON
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl import cluster, pools
from megatron_rl.algorithms.recipes import find_recipe
from megatron_rl.config import Config
from megatron_rl.config_loading import load_config
from megatron_rl.data.packing import make_batch
from megatron_rl.data.prompts import load_prompts
from megatron_rl.sft import demonstrations
from megatron_rl.trainer import step
from megatron_rl.trainer.rank_batch import RankBatch, micro_batches
from megatron_rl.trainer.trainer import MegatronTrainer
from megatron_rl.trainer.worker import Worker
from megatron_rl.types import Batch
from tests.trainer.bare_megatron import bare_update, with_labels

WARM_UP = 3
"""First updates of each kind, not counted."""


class BenchWorker(Worker):
    """A rank that can also make a bare step."""

    def prepare(self, batch: RankBatch) -> None:
        """Pack the micro-batches of the bare step, as a data loader would in the background."""
        (mini,) = micro_batches(batch)
        self.packed = [with_labels(micro) for micro in step.pack_all(mini, device=self.device)]

    def bare(self) -> float:
        """Seconds of one bare step, until the last rank is done."""
        dist.barrier()
        start = time.perf_counter()
        bare_update(self, self.packed)
        dist.barrier()
        return time.perf_counter() - start


class BenchTrainer(MegatronTrainer):
    """The driver's handle on such ranks."""

    worker = BenchWorker

    def prepare(self, batch: Batch) -> None:
        """Pack the micro-batches of the bare step."""
        self._each("prepare", self._parts(batch), what="Packing")

    def bare(self) -> float:
        """Seconds of one bare step."""
        return float(max(self._call("bare", what="Bare step")))


def make_step(config: Config, model: Path) -> Batch:
    """A step's batch: groups of reference answers to the experiment's prompts, with random rewards."""
    prompts = load_prompts(config.data, model)
    taken, groups = prompts.take(config.prompts_per_step), config.sampling.samples_per_prompt
    samples = demonstrations([p for p in taken for _ in range(groups)], prompts)
    rewards = np.random.default_rng(0).integers(0, 2, len(samples)).tolist()
    judged = [replace(s, group=i // groups, reward=float(rewards[i])) for i, s in enumerate(samples)]
    budget = config.trainer.tokens_per_micro_batch
    batch = make_batch(judged, dp=config.trainer.world_size, mini_batches=1, tokens_per_micro_batch=budget)
    return find_recipe(config.algorithm.recipe).apply(batch)


def run(settings: dict[str, Any], logs: Path) -> dict[str, list[float]]:
    """Seconds of each update, ours and bare. `settings`: overrides of the experiment, model directory, repeats."""
    config, model = load_config(settings["overrides"]), Path(settings["model"])
    ranks, ours_s, bare_s = config.trainer.world_size, [], []
    cluster.start(address=None, cpus=ranks)
    try:
        trainer = BenchTrainer(config, model, pool=pools.Pool("trainer", ranks, cpus=1), logs=logs)
        trainer.ready()
        trainer.begin("rl")
        batch = trainer.logprobs(make_step(config, model))
        trainer.prepare(batch)
        for _ in range(WARM_UP + settings["repeats"]):
            start = time.perf_counter()
            trainer.update(batch)
            ours_s.append(time.perf_counter() - start)
            bare_s.append(trainer.bare())
        trainer.stop()
    finally:
        cluster.stop()
    return {"ours_s": ours_s[WARM_UP:], "bare_s": bare_s[WARM_UP:]}


if __name__ == "__main__":
    out = Path(sys.argv[2])
    out.write_text(json.dumps(run(json.loads(sys.argv[1]), out.parent)))
