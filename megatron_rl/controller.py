"""THE LOOP. Read this file first: every other module serves one of its lines.

The controller handles references and per-sample scalars, never token arrays: its cost grows with samples, not tokens.
To write another dataflow, copy this file and change it.
"""

from dataclasses import dataclass

from megatron_rl.algorithms.recipes import Recipe
from megatron_rl.config import Config
from megatron_rl.data.prompts import Prompts
from megatron_rl.metrics import Metrics, sample_metrics
from megatron_rl.protocols import Engine, Reward, WeightSync
from megatron_rl.sft import Training, warm_start


@dataclass(frozen=True, slots=True)
class Parts(Training):
    """What the loop is made of; `run.py` chooses the classes."""

    engine: Engine
    reward: Reward
    recipe: Recipe
    weights: WeightSync


def train(config: Config, parts: Parts) -> None:
    """Policy updates until `config.steps`; step s leaves weights of version s in trainer and engines."""
    p = parts
    step = p.checkpoint.restore()
    if step is None:
        step = warm_start(config, p)  # 0, after the supervised updates that were asked for
    p.reward.drop(from_step=step + 1 if step else 0)  # what an earlier process sampled after its last checkpoint
    p.weights.push(version=step)  # engine and trainer agree before the first sample
    if step == 0:
        with p.metrics.step(step) as m:
            m.log(evaluate(config, p, step))
    while step < config.steps:
        step += 1
        with p.metrics.step(step) as m:
            with m.time("generate"):
                prompts = p.prompts.take(config.prompts_per_step)
                samples = p.engine.generate(
                    prompts, samples_per_prompt=config.sampling.samples_per_prompt, seed=seed_of(config, step)
                )
            with m.time("reward"):
                samples = p.reward(samples, prompts, step=step)
            m.log_samples(samples)
            kept = p.recipe.keep(samples)  # whole groups may be dropped here; GRPO drops none
            batch = p.pack(kept, mini_batches=config.algorithm.mini_batches)
            with m.time("logprobs"):
                batch = p.trainer.logprobs(batch)  # old policy and frozen reference, when the recipe needs them
            with m.time("advantage"):
                batch = p.recipe.apply(batch)
            with m.time("update"):
                m.log(p.trainer.update(batch))
            with m.time("sync"):
                m.log(p.weights.push(version=step))
            if evaluation_due(config, step):
                with m.time("evaluate"):
                    m.log(evaluate(config, p, step))
        if p.checkpoint.due(step):  # after the metrics of this step are on disk: a resumed run misses none
            p.checkpoint.save(step)


def evaluate(config: Config, parts: Parts, step: int) -> dict[str, float]:
    """Mean reward of sampled answers to the held-out prompts, which never train."""
    prompts = parts.prompts.held_out
    if not prompts:
        return {}
    samples = parts.engine.generate(
        prompts, samples_per_prompt=config.evaluation.samples_per_prompt, seed=seed_of(config, -1 - step)
    )
    judged = parts.reward(samples, prompts, step=step, split="eval")
    return {"eval/reward": sample_metrics(judged)["reward/mean"]}


def evaluation_due(config: Config, step: int) -> bool:
    """After the last step, and every `evaluation.every` steps, where prompts are held out and an engine answers."""
    if config.mode != "train" or config.data.held_out == 0:
        return False
    every = config.evaluation.every
    return step == config.steps or (every > 0 and step % every == 0)


def sample(config: Config, prompts: Prompts, engine: Engine, reward: Reward, metrics: Metrics) -> None:
    """mode=rollout_only: generate and judge with the starting weights, step by step, and train nothing."""
    reward.drop(from_step=0)
    for step in range(1, config.steps + 1):
        with metrics.step(step) as m:
            with m.time("generate"):
                taken = prompts.take(config.prompts_per_step)
                samples = engine.generate(
                    taken, samples_per_prompt=config.sampling.samples_per_prompt, seed=seed_of(config, step)
                )
            with m.time("reward"):
                m.log_samples(reward(samples, taken, step=step))


def seed_of(config: Config, step: int) -> int:
    """Seed of everything sampled at `step`; distinct for every (run seed, step)."""
    return config.seed * 1_000_003 + step
