"""The numbers of a run: step timer, metrics.jsonl, TensorBoard, reward.png, the progress display, the final summary.

A record is one object a step in metrics.jsonl. Record 0 describes the starting weights; record s, update s and the
weights after it. `time/step_s` is the step without its evaluation. Supervised warm-up steps go to warm_start.jsonl.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from megatron_rl.progress import Progress, summary_lines
from megatron_rl.records import append_record, drop_records, read_records
from megatron_rl.reward_plot import draw_rewards
from megatron_rl.types import Sample

logger = logging.getLogger(__name__)

_DRAW_EVERY_S = 60.0  # a picture takes a fifth of a second
MISMATCH, MISMATCH_ALARM = "mismatch/logprob_abs_diff_mean", 0.1
"""In nats a token. bfloat16 on both sides is at 0.01 to 0.03; an engine with other weights, above 0.5."""


class Step:
    """What one step logs and how long its stages take."""

    def __init__(self, progress: Progress) -> None:
        self.values: dict[str, float] = {}
        self._progress = progress

    def log(self, values: Mapping[str, float]) -> None:
        """Add numbers to this step's record."""
        self.values.update({key: float(value) for key, value in values.items()})

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Add what `sample_metrics` says of the step's samples."""
        self.log(sample_metrics(samples))

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the seconds spent inside to time/<stage>_s."""
        self._progress.stage(stage)
        start = time.perf_counter()
        yield
        key = f"time/{stage}_s"
        self.values[key] = self.values.get(key, 0.0) + time.perf_counter() - start
        self._progress.stage("")


class Metrics:
    """Records the steps of one run below `directory`. Use as a context manager: it shows progress while it is open."""

    def __init__(self, directory: Path, *, name: str, steps: int, console: Console | None = None) -> None:
        """steps: updates of the whole run. console: standard output unless given."""
        self.directory, self.name, self.steps = directory, name, steps
        self.path, self.warm_start_path = directory / "metrics.jsonl", directory / "warm_start.jsonl"
        self._progress = Progress(name, steps=steps, console=console or Console())
        self._writers: dict[Path, Any] = {}  # torch's SummaryWriter of each record file written to; None once it failed
        self._drawn_s = time.monotonic()
        self._started_s = time.monotonic()
        self._alarmed = False

    def __enter__(self) -> "Metrics":
        self._threads_excepthook, threading.excepthook = threading.excepthook, _forgive_writers
        self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        if self.path in self._writers:
            self._draw()
        for path, writer in self._writers.items():
            with self._forgiving(path):
                if writer is not None:
                    writer.close()
        threading.excepthook = self._threads_excepthook

    def status(self, text: str) -> None:
        """Say what is going on outside of steps: "starting 2 engines"."""
        self._progress.status(text)

    @contextmanager
    def step(self, step: int) -> Iterator[Step]:
        """Time one step and record what it logged; a step that raises leaves no record.

        The first step of a process removes the records of that step and later: a resumed run writes them again.
        """
        with self._record(self.path, step) as current:
            yield current
        if step == self.steps or time.monotonic() - self._drawn_s > _DRAW_EVERY_S:
            self._draw()

    @contextmanager
    def warm_start_step(self, step: int, *, of: int) -> Iterator[Step]:
        """As `step`, for supervised update `step` (from 1) of `of` before the policy's."""
        with self._record(self.warm_start_path, step, warm_start_steps=of) as current:
            yield current

    @contextmanager
    def _record(self, path: Path, step: int, *, warm_start_steps: int | None = None) -> Iterator[Step]:
        if path not in self._writers:
            self._open(path, step)
        self._progress.begin(step, warm_start_steps=warm_start_steps)
        current = Step(self._progress)
        start = time.perf_counter()
        yield current
        wall_s = time.perf_counter() - start
        record: dict[str, float] = {"step": step, **current.values}
        if any(key.startswith("time/") for key in record):  # not for an evaluation alone
            step_s = wall_s - record.get("time/evaluate_s", 0.0)
            record["time/step_s"] = step_s
            if tokens := record.get("tokens/total", record.get("tokens")):
                record["throughput/tokens_per_s"] = tokens / step_s
        record |= memory_metrics()
        append_record(path, record)
        with self._forgiving(path):
            if (writer := self._writers[path]) is not None:
                for key in record.keys() - {"step"}:
                    writer.add_scalar(key, record[key], step)
        self._progress.end(record, wall_s=wall_s)
        self._alarm(record.get(MISMATCH, 0.0))

    def _alarm(self, mismatch: float) -> None:
        """Say that trainer and engines have drifted apart, once until they are near each other again."""
        was, self._alarmed = self._alarmed, mismatch > MISMATCH_ALARM
        if self._alarmed and not was:
            text = (
                f"ALARM: log-probabilities of trainer and engines differ by {mismatch:.3g} a token: the policy learns "
                "from another one's samples. weights.verify=true tells whether the weights are to blame; if precision "
                "or kernels are, raise the precision of rollout.* or set algorithm.importance_cap=2."
            )
            logger.warning(text)
            self._progress.print([text])

    def _open(self, path: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import

        records = drop_records(path, from_step=step)
        directory = self.directory / "tensorboard"
        if path == self.path:
            self._progress.history(records)
        else:
            directory /= path.stem
        self._writers[path] = None
        with self._forgiving(path):
            # purge_step: events of an earlier process at this step or later are hidden.
            self._writers[path] = SummaryWriter(str(directory), purge_step=step, flush_secs=10)

    @contextmanager
    def _forgiving(self, path: Path) -> Iterator[None]:
        """Say that TensorBoard's disk refused, and go on without it: a plot is not worth a run."""
        try:
            yield
        except OSError as error:
            self._writers[path] = None
            self._progress.print([f"TensorBoard gets no more of {path.name}, which has it all: {error}"])

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        try:
            draw_rewards(read_records(self.path), self.directory / "reward.png", title=self.name)
        except OSError as error:  # a picture is not worth a run; the numbers it shows are in metrics.jsonl
            logger.warning("reward.png could not be drawn: %s", error)

    def summary(self, results: Mapping[str, Path]) -> None:
        """Print evaluation before and after, time by stage, and where the results lie (label -> path)."""
        self._progress.stop()
        lines = summary_lines(
            read_records(self.path),
            read_records(self.warm_start_path),
            results=results,
            wall_s=time.monotonic() - self._started_s,
        )
        self._progress.print(["", *lines])


def _forgive_writers(failure: threading.ExceptHookArgs) -> None:
    """TensorBoard's writer thread prints no traceback of a full disk: `add_scalar` or `close` raises the same error."""
    is_writer = type(failure.thread).__module__.startswith("tensorboard.")
    if not (is_writer and isinstance(failure.exc_value, OSError)):
        threading.__excepthook__(failure)


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards, lengths and endings of judged samples.

    `group/uniform_fraction` is the share of groups whose rewards are all equal: they teach nothing.
    """
    rewards = np.array([s.reward for s in samples], dtype=np.float64)
    response = np.array([s.response_tokens for s in samples])
    groups: dict[int, set[float | None]] = {}
    for sample in samples:
        groups.setdefault(sample.group, set()).add(sample.reward)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "group/uniform_fraction": sum(len(g) == 1 for g in groups.values()) / len(groups),
        "response_tokens/mean": float(response.mean()),
        "response_tokens/max": float(response.max()),
        "response_tokens/cut_fraction": sum(s.finish == "length" for s in samples) / len(samples),
        "tokens/total": float(response.sum() + sum(s.prompt_tokens for s in samples)),
    }


def memory_metrics() -> dict[str, float]:
    """Resident memory of this process and all its descendants: the sum and the largest. Shared pages count in each."""
    own = psutil.Process()
    sizes = []
    for process in (own, *own.children(recursive=True)):
        try:
            sizes.append(process.memory_info().rss)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended meanwhile
            continue
    return {"rss/sum_bytes": float(sum(sizes)), "rss/max_bytes": float(max(sizes))}
