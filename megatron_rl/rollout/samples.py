"""samples.jsonl: every judged sample of a run, one object a line, and its way back into samples to train on."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.errors import BackendError, DataError
from megatron_rl.types import Prompt, Rollouts, Sample

_STEP = re.compile(rb'^\{"step": (\d+),')


def append_samples(
    path: Path,
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    rollouts: Sequence[Rollouts],
    *,
    step: int,
    split: str,
) -> None:
    """Append one line per sample; `samples` carry their rewards, `rollouts[i]` holds the row of samples[i].

    Raises: BackendError when the disk refuses; what was there before stays.
    """
    lines = "".join(
        json.dumps(_record(sample, prompts[sample.group], text, rows, step=step, split=split), ensure_ascii=False)
        + "\n"
        for sample, text, rows in zip(samples, texts, rollouts, strict=True)
    )
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(lines.encode())
    except OSError as error:
        if path.exists():
            os.truncate(path, size)
        raise BackendError(
            f"{path} cannot be written ({error.strerror}). Free space there and start the same command again."
        ) from error


def _record(sample: Sample, prompt: Prompt, text: str, rollouts: Rollouts, *, step: int, split: str) -> dict[str, Any]:
    tokens, logprobs, length = rollouts.row(sample.row)
    return {
        "step": step,  # first: `drop_samples` looks only there
        "split": split,
        "group": sample.group,
        "prompt_id": sample.prompt_id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "response": text,
        "reward": sample.reward,
        "version": sample.version,
        "finish": sample.finish,
        "prompt_tokens": tokens[:length].tolist(),
        "response_tokens": tokens[length:].tolist(),
        # The shortest decimals that give back the same float32.
        "logprobs": [float(str(value)) for value in logprobs[length:]],
    }


def drop_samples(path: Path, *, from_step: int) -> None:
    """Cut the file before its first sample of `from_step` or later, or before a line that a kill left torn."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end = 0
        for line in file:
            found = _STEP.match(line)
            if found is None or not line.endswith(b"\n") or int(found.group(1)) >= from_step:
                break
            end += len(line)
    os.truncate(path, end)


def read_samples(path: Path) -> Iterator[tuple[int, list[Sample]]]:
    """(step, training samples) for each step of the file in order; the tokens of a step lie in one `Rollouts`.

    Raises: DataError naming the line that holds something else.
    """
    records: list[dict[str, Any]] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            record = json.loads(line)
            if record["split"] != "train":
                continue
            if records and record["step"] != records[0]["step"]:
                yield records[0]["step"], _samples(records)
                records = []
            _check_numbers(record)
            records.append({key: record[key] for key in _KEPT})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} line {number} is not a recorded sample ({type(error).__name__}: {error}). Use a samples.jsonl "
                "that a run of this version wrote, whole."
            ) from error
    if records:
        yield records[0]["step"], _samples(records)


_KEPT = (
    "step", "group", "prompt_id", "reward", "version", "finish", "prompt_tokens", "response_tokens", "logprobs",
)  # fmt: skip


def _check_numbers(record: dict[str, Any]) -> None:
    """What no run records, and training would not stop at. Raises: ValueError."""
    logprobs, tokens = record["logprobs"], record["response_tokens"]
    if len(logprobs) != len(tokens):
        raise ValueError(f"{len(logprobs)} log-probabilities of {len(tokens)} response tokens")
    # in double precision, where null is NaN and 1e39, infinite as float32, is larger than any of that
    values = np.array([record["reward"], *logprobs], dtype=np.float64)
    if not (abs(values) <= np.finfo(np.float32).max).all():
        raise ValueError("a reward or a log-probability that is no finite number")


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except OSError as error:
        raise DataError(f"samples={path} cannot be read ({error.strerror}). Name a samples.jsonl of a run.") from error


def _samples(records: Sequence[dict[str, Any]]) -> list[Sample]:
    rows = [np.array(r["prompt_tokens"] + r["response_tokens"], dtype=np.int32) for r in records]
    logprobs = [np.array([0.0] * len(r["prompt_tokens"]) + r["logprobs"], dtype=np.float32) for r in records]
    rollouts = Rollouts(
        tokens=np.concatenate(rows),
        logprobs=np.concatenate(logprobs),
        offsets=np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64),
        prompt_lengths=np.array([len(r["prompt_tokens"]) for r in records], dtype=np.int64),
    )
    return [
        Sample(
            prompt_id=r["prompt_id"],
            group=r["group"],
            rollouts=rollouts,
            row=i,
            prompt_tokens=len(r["prompt_tokens"]),
            response_tokens=len(r["response_tokens"]),
            finish=r["finish"],
            version=r["version"],
            reward=r["reward"],
        )
        for i, r in enumerate(records)
    ]
