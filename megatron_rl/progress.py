"""How a run looks while it goes: a live panel on a terminal, plain lines anywhere else, and the final summary."""

import logging
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_rl.records import Record

logger = logging.getLogger(__name__)

_BARS = "▁▂▃▄▅▆▇█"
_RECENT = 20  # steps whose pace foretells the rest
_WARM_START_LINE_S = 5.0  # warm-up steps are short: one plain line in so many seconds
_NUMBERS = {
    "loss": "loss",
    "kl": "kl",
    "entropy": "entropy",
    "grad_norm": "grad norm",
    "lr": "lr",
    "mismatch/logprob_abs_diff_mean": "mismatch",
}


class Progress:
    """The display of one run. On a terminal it repaints itself; elsewhere it prints one line a step."""

    def __init__(self, name: str, *, steps: int, console: Console) -> None:
        self.name, self.steps, self.console = name, steps, console
        self.is_live = console.file.isatty() and not console.is_dumb_terminal
        self._live: Live | None = None
        self._now, self._step, self._done, self._of, self._warm_start = "", 0, 0, steps, False
        self._last: Mapping[str, float | None] = {}
        self._rewards: list[float] = []
        self._evaluations: list[tuple[int, float]] = []
        self._paces_s: list[float] = []
        self._started_s = self._ended_s = self._printed_s = time.monotonic()

    def start(self) -> None:
        """Show the panel, on a terminal."""
        if self.is_live:
            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=2)
            self._live.start()

    def stop(self) -> None:
        """Leave the panel as it is and give the terminal back."""
        if self._live is not None:
            self._now = ""
            self._live.stop()
            self._live = None

    def print(self, lines: Iterable[str]) -> None:
        """Plain lines to the console and the log."""
        for line in lines:
            logger.info("%s", line)
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def status(self, text: str) -> None:
        """What is going on outside of steps."""
        self._now = text
        logger.info("%s", text)
        if not self.is_live:
            self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def stage(self, name: str) -> None:
        """What is going on inside a step."""
        self._now = name

    def history(self, records: Sequence[Record]) -> None:
        """Show what an earlier process had recorded."""
        for record in records:
            self._remember(record)

    def begin(self, step: int, *, warm_start_steps: int | None) -> None:
        """A step begins."""
        is_warm_start = warm_start_steps is not None
        if is_warm_start != self._warm_start:
            self._paces_s.clear()
        self._warm_start, self._of = is_warm_start, self.steps if warm_start_steps is None else warm_start_steps
        self._step, self._done, self._now = step, max(step - 1, 0), "evaluate" if step == 0 else ""

    def end(self, record: Mapping[str, float | None], *, wall_s: float) -> None:
        """A step has ended and been recorded."""
        now_s = time.monotonic()
        if self._step > 0:
            # From end to end where that is longer: checkpoints lie between steps.
            self._paces_s = [*self._paces_s, max(wall_s, now_s - self._ended_s if self._paces_s else 0.0)][-_RECENT:]
        self._ended_s, self._done = now_s, self._step
        self._last = record
        if not self._warm_start:
            self._remember(record)
        line = self._line(record)
        logger.info("%s", line)
        is_due = not self._warm_start or self._step == self._of or now_s - self._printed_s > _WARM_START_LINE_S
        if not self.is_live and is_due:
            self._printed_s = now_s
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _remember(self, record: Mapping[str, float | None]) -> None:
        if (reward := record.get("reward/mean")) is not None:
            self._rewards.append(reward)
        if (evaluation := record.get("eval/reward")) is not None:
            self._evaluations.append((int(record["step"] or 0), evaluation))

    def _remaining(self) -> str:
        return clock(statistics.mean(self._paces_s) * (self._of - self._done)) if self._paces_s else "?"

    def _line(self, record: Mapping[str, float | None]) -> str:
        parts = [f"{'warm start' if self._warm_start else 'step'} {self._step}/{self._of}"]
        for key, label in {"reward/mean": "reward", "eval/reward": "eval"}.items():
            if (value := record.get(key)) is not None:
                parts.append(f"{label} {value:.3f}")
        parts += [f"{label} {value:.3g}" for key, label in _NUMBERS.items() if (value := record.get(key)) is not None]
        if (step_s := record.get("time/step_s")) is not None:
            parts.append(f"{step_s:.2f} s ({', '.join(f'{stage} {s:.2f}' for stage, s in stages(record).items())})")
        if (rate := record.get("throughput/tokens_per_s")) is not None:
            parts.append(f"{rate:,.0f} tokens/s")
        if self._step < self._of and self._paces_s:
            parts.append(f"{self._remaining()} left")
        return "  ".join(parts)

    def _panel(self) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        elapsed = clock(time.monotonic() - self._started_s)
        bar = ProgressBar(total=max(self._of, 1), completed=self._done, width=36)
        head.add_row(
            Text(self.name, "bold cyan"),
            Text(f"{'warm start' if self._warm_start else 'step'} {self._step}/{self._of}", "bold"),
            bar,
            f"{elapsed} gone, {self._remaining()} left",
        )
        body = Table.grid(padding=(0, 2))
        body.add_column(justify="right", style="dim")
        body.add_column()
        for label, value in self._rows():
            body.add_row(label, value)
        return Group(head, body)

    def _rows(self) -> list[tuple[str, str]]:
        last = self._last
        rows = [("now", self._now or "-")]
        if self._rewards:
            rows.append(("reward", f"{self._rewards[-1]:.3f}  {sparkline(self._rewards)}"))
        if self._evaluations:
            first, latest = self._evaluations[0], self._evaluations[-1]
            arrow = f" -> {latest[1]:.3f} (step {latest[0]})" if len(self._evaluations) > 1 else ""
            rows.append(("held out", f"{first[1]:.3f} (step {first[0]}){arrow}"))
        numbers = [f"{label} {value:.3g}" for key, label in _NUMBERS.items() if (value := last.get(key)) is not None]
        if numbers:
            rows.append(("update", "   ".join(numbers)))
        if (step_s := last.get("time/step_s")) is not None:
            parts = "   ".join(f"{stage} {s:.2f}" for stage, s in stages(last).items())
            rows.append(("time", f"{step_s:.2f} s:  {parts}"))
        if (rate := last.get("throughput/tokens_per_s")) is not None:
            rows.append(("speed", f"{rate:,.0f} tokens/s"))
        if (memory := last.get("rss/sum_bytes")) is not None:
            rows.append(
                ("memory", f"{memory / 1e9:.1f} GB, largest process {(last['rss/max_bytes'] or 0) / 1e9:.1f} GB")
            )
        return rows


def stages(record: Mapping[str, float | None]) -> dict[str, float]:
    """Seconds of each stage of a record, the whole step left out."""
    return {
        key.removeprefix("time/").removesuffix("_s"): value
        for key, value in record.items()
        if key.startswith("time/") and key != "time/step_s" and value is not None
    }


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """The values as a row of bars, averaged to at most `width`; the bars span their own range."""
    count = min(width, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((m - low) * scale)] for m in means)


def clock(seconds: float) -> str:
    """h:mm:ss."""
    return str(timedelta(seconds=round(seconds)))


def summary_lines(
    records: Sequence[Record], warm_start: Sequence[Record], *, results: Mapping[str, Path], wall_s: float
) -> list[str]:
    """Evaluation before and after, time by stage, where the results lie."""
    lines = []
    evaluations = [(r["step"], value) for r in records if (value := r.get("eval/reward")) is not None]
    if evaluations:
        (start, before), (end, after) = evaluations[0], evaluations[-1]
        change = f"{before:.3f} at step {start} -> {after:.3f} at step {end} ({after - before:+.3f})"
        lines.append(f"{'held-out reward':<16}  {change}")
    totals: dict[str, list[float]] = {}
    for record in records:
        for stage, seconds in stages(record).items():
            totals.setdefault(stage, []).append(seconds)
    if warm_start:
        totals = {"warm start": [s for r in warm_start if (s := r.get("time/step_s")) is not None], **totals}
    whole = sum(map(sum, totals.values()))
    if whole:
        lines.append("time by stage           total  share   median of a step")
        lines += [
            f"  {stage:<16} {sum(s):>9.1f} s  {sum(s) / whole:>5.0%}  {statistics.median(s):>9.2f} s"
            for stage, s in totals.items()
            if s
        ]
    lines.append(f"{'this process':<16}  {clock(wall_s)}")
    lines += [f"{label:<16}  {path}" for label, path in results.items()]
    return lines
