"""What a step costs: by stage, against a bare megatron-core update, and against TRL's GRPOTrainer on the same task.

Usage: make bench, or python tools/bench_step.py [--steps N] [--rounds N] [--json FILE]. Takes minutes. The arms run in
turns, so that other load on the machine meets all of them; figures are medians.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_rl.config import Config  # noqa: E402
from megatron_rl.config_loading import load_config  # noqa: E402
from megatron_rl.data.sources import characters, read_questions  # noqa: E402
from megatron_rl.run import make_model  # noqa: E402

TRL_PACKAGES = ROOT / "build" / "bench"
EXPERIMENT = "experiment=cpu_digits"
STAGES = ("generate", "reward", "logprobs", "advantage", "update", "sync")
WARM_UP = 2
"""First steps of each run, not counted."""
LIMITS = {"update_over_bare": 1.10, "controller_s": 0.050, "step_over_trl": 2.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the arms in turns and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of each run, warm-up and last included")
    parser.add_argument("--rounds", type=int, default=3, help="how often the arms take turns")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    if options.steps < WARM_UP + 2 or options.rounds < 1:
        parser.error(f"--steps must be at least {WARM_UP + 2} and --rounds at least 1")
    if not (TRL_PACKAGES / "trl").is_dir():
        parser.error(f"{TRL_PACKAGES} holds no TRL to compare with. Run `make bench` once: it installs it there.")
    with tempfile.TemporaryDirectory(prefix="bench-step-") as directory:
        figures = measure(Path(directory), steps=options.steps, rounds=options.rounds)
    print("\n".join(table(figures)))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def measure(directory: Path, *, steps: int, rounds: int) -> dict[str, Any]:
    """Run the arms, `rounds` times in turns, with one model; files go below `directory`."""
    config = load_config([EXPERIMENT, "name=bench"])
    model = directory / "model"
    make_model(config, model, characters(read_questions(config.data), config.data.template))
    overrides = [EXPERIMENT, "name=bench", "sft.steps=0"]
    records: list[dict[str, float]] = []
    # One thread too: on a machine with other load, threads that wait for one another can cost TRL tenfold.
    trl: dict[int, list[dict[str, float]]] = {threads: [] for threads in (len(os.sched_getaffinity(0)), 1)}
    updates: dict[str, list[float]] = {"ours_s": [], "bare_s": []}
    for i in range(rounds):
        print(f"round {i + 1} of {rounds}: update", flush=True)
        settings = {"overrides": overrides, "model": str(model), "repeats": steps}
        for name, values in arm("bench_update.py", settings, directory / f"update-{i}").items():
            updates[name] += values
        print(f"round {i + 1} of {rounds}: step", flush=True)
        records += our_steps(model, directory / f"step-{i}", steps=steps)
        for threads, counted in trl.items():
            print(f"round {i + 1} of {rounds}: TRL, {threads} thread(s)", flush=True)
            settings = trl_settings(config, model, steps=steps, threads=threads)
            counted += arm("bench_trl.py", settings, directory / f"trl-{i}-{threads}", TRL_PACKAGES)[WARM_UP:]
    return summarize(records, updates, trl)


def arm(script: str, settings: dict[str, Any], directory: Path, *paths: Path) -> Any:
    """What another tool measured, in a process of its own with `paths` on its PYTHONPATH."""
    directory.mkdir()
    run([f"tools/{script}", json.dumps(settings), str(directory / "out.json")], directory / "log", paths)
    return json.loads((directory / "out.json").read_text())


def run(arguments: list[str], log: Path, paths: Sequence[Path] = ()) -> None:
    """Run Python in the repository; exit with the end of its log when it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))), "HF_HUB_OFFLINE": "1"}
    with open(log, "wb") as file:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise SystemExit(f"{arguments} ended with {done.returncode}:\n{log.read_text(errors='replace')[-3000:]}")


def our_steps(model: Path, directory: Path, *, steps: int) -> list[dict[str, float]]:
    """The metrics of each step of a run of the program, and `period_s`: from one record to the next."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # seconds to import

    directory.mkdir()
    overrides = ["name=bench", f"steps={steps}", "sft.steps=0", "algorithm.warmup_steps=0", "checkpoint.every=0"]
    where = ["model=hf", f"model.path={model}", f"runs_dir={directory}"]
    run(["-m", "megatron_rl.main", EXPERIMENT, *overrides, *where], directory / "log")
    lines = (directory / "bench" / "metrics.jsonl").read_text().splitlines()
    records = {r["step"]: r for r in map(json.loads, lines)}
    events = EventAccumulator(str(directory / "bench" / "tensorboard")).Reload().Scalars("time/step_s")
    recorded_s = {event.step: event.wall_time for event in events}
    # Not the last one: it evaluates.
    counted = range(WARM_UP + 1, steps)
    return [{**records[s], "period_s": recorded_s[s] - recorded_s[s - 1]} for s in counted]


def trl_settings(config: Config, model: Path, *, steps: int, threads: int) -> dict[str, Any]:
    """The same step for TRL."""
    return {
        "model": str(model),
        "prompts": str(ROOT / str(config.data.path)),
        "steps": steps,
        "prompts_per_step": config.prompts_per_step,
        "samples_per_prompt": config.sampling.samples_per_prompt,
        "max_tokens": config.sampling.max_tokens,
        "temperature": config.sampling.temperature,
        "kl_coef": config.algorithm.kl_coef,
        "lr": config.algorithm.lr,
        "threads": threads,
    }


def summarize(
    records: list[dict[str, float]], updates: dict[str, list[float]], trl: dict[int, list[dict[str, float]]]
) -> dict[str, Any]:
    """Medians, and the ratios that are limited. TRL counts with the number of threads that suits it better."""

    def own_s(record: dict[str, float]) -> float:
        return record["period_s"] - sum(record[f"time/{stage}_s"] for stage in STAGES)

    def of(name: str) -> float:
        return median(r[name] for r in records)

    pairs = list(zip(updates["ours_s"], updates["bare_s"], strict=True))
    step_s = of("period_s")
    trl_s = {threads: median(r["step_s"] for r in steps) for threads, steps in trl.items()}
    best = min(trl_s, key=lambda threads: trl_s[threads])
    return {
        "stage_s": {stage: of(f"time/{stage}_s") for stage in STAGES},
        "step_s": step_s,
        "controller_s": median(own_s(r) for r in records),
        "controller_unrecorded_s": median(own_s(r) - (r["period_s"] - r["time/step_s"]) for r in records),
        "response_tokens": of("response_tokens/mean"),
        "update_s": median(updates["ours_s"]),
        "bare_update_s": median(updates["bare_s"]),
        "update_over_bare": median(ours / bare for ours, bare in pairs),
        "trl_step_s": trl_s[best],
        "trl_threads": best,
        "trl_step_s_by_threads": trl_s,
        "trl_response_tokens": median(r["response_tokens"] for r in trl[best]),
        "step_over_trl": step_s / trl_s[best],
        "counted": {"steps": len(records), "updates": len(pairs), "trl_steps": len(trl[best])},
        "load_average": os.getloadavg()[1],
    }


def table(figures: dict[str, Any]) -> list[str]:
    """The figures for a reader."""

    def limit(name: str) -> str:
        verdict = "ok" if figures[name] <= LIMITS[name] else "MISSED"
        return f"(at most {LIMITS[name]:g}: {verdict})"

    counted = figures["counted"]
    lines = [f"\n{EXPERIMENT}, medians of {counted['steps']} steps, 5-minute load {figures['load_average']:.1f}", ""]
    for stage, seconds in figures["stage_s"].items():
        lines.append(f"  {stage:<12}{seconds * 1e3:9.1f} ms{seconds / figures['step_s']:8.1%}")
    own_s, unrecorded_s = figures["controller_s"], figures["controller_unrecorded_s"]
    lines += [
        f"  {'controller':<12}{own_s * 1e3:9.1f} ms{own_s / figures['step_s']:8.1%}  {limit('controller_s')}, of which "
        f"{(own_s - unrecorded_s) * 1e3:.1f} ms write the record",
        f"  {'whole step':<12}{figures['step_s'] * 1e3:9.1f} ms",
        "",
        f"update / bare megatron-core  {figures['update_over_bare']:.3f}  {limit('update_over_bare')}: "
        f"{figures['update_s'] * 1e3:.1f} / {figures['bare_update_s'] * 1e3:.1f} ms, {counted['updates']} pairs",
        f"whole step / TRL             {figures['step_over_trl']:.3f}  {limit('step_over_trl')}: "
        f"{figures['step_s'] * 1e3:.0f} / {figures['trl_step_s'] * 1e3:.0f} ms, {counted['trl_steps']} TRL steps with "
        f"{figures['trl_threads']} thread(s), "
        f"{figures['response_tokens']:.1f} / {figures['trl_response_tokens']:.1f} response tokens a sample",
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
