"""reward.png: the reward of training samples and of held-out prompts over the steps."""

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.records import Record

_WINDOW = 10  # steps of the running mean


def draw_rewards(records: Sequence[Record], path: Path, *, title: str) -> None:
    """Write the picture; nothing where no record holds a reward."""
    train, held_out = _points(records, "reward/mean"), _points(records, "eval/reward")
    if not train and not held_out:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, rewards = [s for s, _ in train], [r for _, r in train]
        axes.plot(steps, rewards, color="tab:blue", alpha=0.3, linewidth=1, label="training samples, each step")
        axes.plot(steps, _running_mean(rewards), color="tab:blue", linewidth=2, label=f"mean of {_WINDOW} steps")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="tab:orange", marker="o", linewidth=1.5, label="held-out prompts")
        for step, reward in {held_out[0], held_out[-1]}:
            axes.annotate(f"{reward:.3f}", (step, reward), (0, 8), textcoords="offset points", ha="center")
    rewards = [r for _, r in (*train, *held_out)]
    if min(rewards) >= 0 and max(rewards) <= 1:
        axes.set_ylim(0, 1.02)
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png")
    os.replace(partial, path)


def _points(records: Sequence[Record], key: str) -> list[tuple[float, float]]:
    return [(r["step"] or 0, value) for r in records if (value := r.get(key)) is not None]


def _running_mean(values: Sequence[float]) -> list[float]:
    windows = [values[max(0, i + 1 - _WINDOW) : i + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]
