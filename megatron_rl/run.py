"""Composition root: the only file that names the concrete classes behind the loop's parts.

Whatever can be refused is refused before Ray starts; heavy imports come after the config is known to be sound.
"""

import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.arrangement import cpus_needed
from megatron_rl.checkpoint import STATE, Checkpoints, complete
from megatron_rl.checks import engine_of, longest_demonstration, longest_prompt, topology_of
from megatron_rl.config import Config
from megatron_rl.convert.source import read_source
from megatron_rl.errors import BackendError
from megatron_rl.formats.hf_files import read_hf_config
from megatron_rl.formats.torch_dist import is_torch_dist
from megatron_rl.models import load_table
from megatron_rl.rollout.options import streamed, why_streamed
from megatron_rl.run_directory import RunDirectory, written_whole


def run_mode(config: Config, run: RunDirectory, stack: ExitStack) -> None:
    """Read data and model, start what `config.mode` needs, run its loop, export. `stack` ends what was started."""
    from megatron_rl.algorithms.recipes import find_recipe
    from megatron_rl.cluster import gather, still_running
    from megatron_rl.controller import Parts, sample, train
    from megatron_rl.data.prompts import Limits, load_prompts
    from megatron_rl.data.sources import characters, read_questions
    from megatron_rl.metrics import Metrics
    from megatron_rl.resharding.schedule import streamed_layouts
    from megatron_rl.resharding.sync import EngineSync
    from megatron_rl.rollout.replay import Replay
    from megatron_rl.sft import Training, finetune

    metrics = stack.enter_context(Metrics(run.path, name=config.name, steps=config.steps))
    if is_finished(config, run):
        metrics.summary(results(run))
        metrics.status(f"{run.path} was complete already. Raise steps to go on, or choose another name.")
        return

    recipe = find_recipe(config.algorithm.recipe)
    questions = read_questions(config.data)
    if not (run.model.exists() and complete(run.checkpoints)):  # without a checkpoint the config may have changed
        make_model(config, run.model, characters(questions, config.data.template))
    if config.model.path is not None:
        check_model(run.model, report=run.logs / "model.refused.txt")
    hf = read_hf_config(run.model)
    if note := rounding(hf, config.trainer.dtype):
        metrics.status(note)
    context = hf["max_position_embeddings"]
    limits = Limits(
        prompt_tokens=longest_prompt(config, context=context),
        demonstration_tokens=longest_demonstration(config, context=context),
        vocab_size=hf["vocab_size"],
    )
    prompts = load_prompts(config.data, run.model, limits=limits, questions=questions)
    replay = Replay(Path(config.samples), vocab_size=hf["vocab_size"], steps=config.steps) if config.samples else None

    trainer, fleet, scoring = start(config, run, hf, stack, status=metrics.status)
    if config.mode == "rollout_only":
        sample(config, prompts, fleet, scoring, metrics)
        metrics.summary(results(run))
        return
    if found := complete(run.checkpoints):
        step, path = found[-1]
        what = "weights, optimizer, schedule, random states and the place in the data"
        metrics.status(f"resuming after step {step}: {what} are those of {path}")
    saver = checkpoints(config, run, trainer=trainer, prompts=prompts)
    signal.signal(signal.SIGUSR1, lambda *_: saver.stop_soon())
    training: dict[str, Any] = {
        "prompts": prompts,
        "trainer": trainer,
        "pack": packer(config, hf),
        "checkpoint": saver,
        "metrics": metrics,
    }
    if config.mode == "sft":
        finetune(config, Training(**training))
    elif replay is not None:
        prompts.held_out = ()  # only what trained was recorded to train on again
        train(config, Parts(**training, engine=replay, reward=replay, recipe=recipe, weights=replay))
    else:
        verify_every = config.weights.verify_every if config.weights.verify else 0
        timeout_s, watched = config.trainer.step_timeout_s, fleet.watched
        wait = partial(gather, what="Weight sync", timeout_s=timeout_s, logs=run.logs, watched=watched)
        spec = sync_spec(config, hf, trainer, fleet)
        if not spec.direct:
            metrics.status(why_streamed(config.rollout.sglang, streamed_layouts(spec), ranks=spec.readers))
        sync = EngineSync(trainer, fleet, spec, gather=wait, still_running=still_running, verify_every=verify_every)
        train(config, Parts(**training, engine=fleet, reward=scoring, recipe=recipe, weights=sync))
    metrics.status("exporting the weights")
    with written_whole(run.hf) as unfinished:
        trainer.export(unfinished)
    metrics.summary(results(run))


def check_model(directory: Path, *, report: Path) -> None:
    """Refuse a Hugging Face checkpoint whose tensors are not those that config.json promises.

    The ranks read what they need: of experts twice as wide, half; of twenty-eight layers, as many as config.json says.
    A converted checkpoint was compared when it was made.
    """
    if not is_torch_dist(directory):
        read_source(directory, report=report)


def rounding(hf: dict[str, Any], dtype: str) -> str | None:
    """What the user should know of a cast at the start."""
    stored = hf.get("dtype", hf.get("torch_dtype"))
    if stored not in ("float32", "float16") or dtype == "float32":
        return None
    return f"the checkpoint is {stored}: its weights are rounded to trainer.dtype={dtype} before the first step"


def make_model(config: Config, directory: Path, characters: str) -> None:
    """Write the random starting model, unless a checkpoint was named."""
    if config.model.path is None:
        from safetensors import SafetensorError

        from megatron_rl.models.random_checkpoint import write_random_checkpoint

        try:
            with written_whole(directory) as partial:
                write_random_checkpoint(partial, config.model.random, characters=characters, seed=config.seed)
        except (OSError, SafetensorError) as error:
            raise BackendError(
                f"The starting model could not be written into {directory}: {error}. Free space there and start the "
                "same command again."
            ) from error


def is_finished(config: Config, run: RunDirectory) -> bool:
    """Whether the last step was saved and exported by an earlier process."""
    found, exported = complete(run.checkpoints), run.hf / "config.json"
    if not found or found[-1][0] < config.steps or config.steps == 0 or not exported.exists():
        return False
    return exported.stat().st_mtime >= (found[-1][1] / STATE).stat().st_mtime  # else of an earlier, shorter run


def results(run: RunDirectory) -> dict[str, Path]:
    """Where the results lie, for the summary; what is not there is left out."""
    places = {
        "metrics": run.path / "metrics.jsonl",
        "reward curve": run.path / "reward.png",
        "samples": run.samples,
        "checkpoints": run.checkpoints,
        "Hugging Face weights": run.hf,
        "logs": run.logs,
    }
    return {label: path for label, path in places.items() if path.exists()}


def start(
    config: Config, run: RunDirectory, hf: dict[str, Any], stack: ExitStack, *, status: Any
) -> tuple[Any, Any, Any]:
    """Start Ray, trainer, engines and scorer, as far as the mode needs them, at the same time.

    Returns: (trainer, fleet, scoring), None for what the mode does without.
    """
    from megatron_rl import cluster, pools
    from megatron_rl.rollout.fleet import MARGIN_S, Fleet
    from megatron_rl.rollout.scorer import Scoring
    from megatron_rl.trainer.trainer import MegatronTrainer

    has_trainer, has_engines = config.mode != "rollout_only", config.mode in ("train", "rollout_only")
    ranks, engines = config.trainer.world_size * has_trainer, config.rollout.engines * has_engines
    if has_trainer and config.parallel.pp > 1:
        topology = topology_of(config, load_table(hf))
        stages = " | ".join(topology.stage_layers())
        status(f"the model's {topology.num_layers} layers over {topology.pp} pipeline stages: {stages}")
    status("starting Ray")
    stack.callback(cluster.stop)
    cluster.start(address=config.cluster.address, cpus=config.cluster.cpus or cpus_needed(config))
    trainer = fleet = scoring = None
    place = pools.trainer_pool(config) if has_trainer else None  # first: what it needs side by side is most
    if has_engines:
        status(f"starting {engines} engine(s)" + (f" and {ranks} trainer rank(s)" if ranks else ""))
        servers, reward = pools.rollout_pool(config), pools.Pool("reward", 1, cpus=1)
        scoring = Scoring(config.reward, run.model, run.samples, pool=reward, logs=run.logs)
        context = hf["max_position_embeddings"]
        settings = config.rollout, config.sampling, run.model
        fleet = Fleet(*settings, context_length=context, pool=servers, logs=run.logs)
    if place:
        trainer = MegatronTrainer(config, run.model, pool=place, logs=run.logs)
    started = [part for part in (trainer, fleet) if part]
    starting = {name: call for part in started for name, call in part.starting.items()}
    timeout_s = max(config.trainer.start_timeout_s, config.rollout.start_timeout_s + MARGIN_S)
    cluster.gather(starting, what="Starting", timeout_s=timeout_s, logs=run.logs)  # the first failure ends the run
    for part in started:
        part.ready()
        stack.callback(part.stop)
    return trainer, fleet, scoring


def packer(config: Config, hf: dict[str, Any]) -> Any:
    """`make_batch` for this run's ranks."""
    from megatron_rl.data.packing import make_batch

    return partial(
        make_batch,
        dp=topology_of(config, load_table(hf)).dp,
        tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
        cp=config.parallel.cp,
        micro_batches_multiple=config.parallel.pp if config.parallel.vpp else 1,
    )


def checkpoints(config: Config, run: RunDirectory, *, trainer: Any, prompts: Any) -> Checkpoints:
    """The run's checkpoints."""
    every, keep = config.checkpoint.every, config.checkpoint.keep
    return Checkpoints(run.checkpoints, trainer=trainer, prompts=prompts, steps=config.steps, every=every, keep=keep)


def sync_spec(config: Config, hf: dict[str, Any], trainer: Any, fleet: Any) -> Any:
    """What trainer and engines compute their plan from. Every rank has a device of its own."""
    from megatron_rl.resharding.spec import BUCKET_BYTES, Placement, SyncSpec

    ours, theirs = trainer.nodes, fleet.nodes
    numbers = {node: i for i, node in enumerate(dict.fromkeys((*ours, *theirs)))}
    places = [(numbers[node], device) for device, node in enumerate((*ours, *theirs))]
    return SyncSpec(
        hf_config=hf,
        trainer=topology_of(config, load_table(hf)),
        engine=engine_of(config),
        trainer_dtype=config.trainer.dtype,
        engine_dtype=config.rollout.dtype,
        engines=config.rollout.engines,
        direct=not streamed(config.rollout.sglang),
        bucket_bytes=BUCKET_BYTES[fleet.device],
        placement=Placement(tuple(places[: len(ours)]), tuple(places[len(ours) :])),
        delta=config.weights.delta,
        fp8=config.rollout.fp8,
    )
