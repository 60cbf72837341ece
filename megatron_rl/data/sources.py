"""Where questions come from: a JSONL file, or a task of the reasoning_gym library. Text only; no tokens here."""

import codecs
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config import DataConfig
from megatron_rl.errors import BackendError, ConfigError, DataError

GENERATE_TIMEOUT_S = 3600.0
"""For all entries of a task: some tasks look for one that fits their options without end."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question as its source gives it."""

    text: str
    answer: str
    """Empty where the task has many right answers and only its verifier can tell."""
    where: str
    """For messages: "prompts.jsonl line 17"."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the source's verifier needs, and further fields of a JSONL line."""


def read_questions(config: DataConfig) -> list[Question]:
    """Every question of the source in its own order, duplicates included.

    Raises: DataError naming file and line, ConfigError naming task or option.
    """
    if config.source == "jsonl":
        assert config.path is not None
        return read_jsonl(Path(config.path))
    assert config.task is not None
    return generate_questions(config.task, config.task_options, size=config.size, seed=config.seed)


def characters(questions: Sequence[Question], template: str) -> str:
    """Every character that a prompt or a reference answer can hold, sorted."""
    found = set(template.replace("{prompt}", ""))
    for question in questions:
        found.update(question.text, question.answer)
    return "".join(sorted(found))


def read_jsonl(path: Path) -> list[Question]:
    """One question a line, {"prompt": str, "answer": str, ...}; blank lines are skipped."""
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise DataError(
            f"data.path={path} cannot be read ({error.strerror}; the working directory is {Path.cwd()}). Set data.path "
            'to a file with one {"prompt": ..., "answer": ...} object a line.'
        ) from error
    questions = [_parse_line(line, f"{path} line {n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not questions:
        raise DataError(f'{path} holds no prompts. Write one {{"prompt": ..., "answer": ...}} object a line.')
    return questions


def _parse_line(line: bytes, where: str) -> Question:
    example = 'Each line is one object such as {"prompt": "2+2=", "answer": "4"}'
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # bytes, JSON, a number of too many digits; too deep a nesting
        raise DataError(f"{where} is not JSON in UTF-8 ({error}): {_shown(line)}. {example}.") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is a {type(value).__name__}, not an object: {_shown(line)}. {example}.")
    for key in ("prompt", "answer"):
        if key not in value:
            raise DataError(f"{where} has no {key!r}, only {', '.join(map(repr, value)) or 'nothing'}. {example}.")
        if not isinstance(value[key], str):
            raise DataError(
                f"{where}: {key!r} is {json.dumps(value[key])[:80]} ({type(value[key]).__name__}), and text is "
                "compared with text. Write it in quotes."
            )
        try:
            value[key].encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: {key!r} holds half of a surrogate pair ({error.reason}), which is no character: no "
                "tokenizer takes it and no file keeps it. Write the whole character."
            ) from error
        if not value[key].strip():
            raise DataError(
                f"{where}: {key!r} is empty, so there is nothing to learn from it. Fill it in or drop the line."
            )
    rest = {k: v for k, v in value.items() if k not in ("prompt", "answer")}
    return Question(value["prompt"], value["answer"], where, rest)


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= 80 else text[:77] + "..."


def generate_questions(task: str, options: Mapping[str, Any], *, size: int, seed: int) -> list[Question]:
    """`size` questions of a reasoning_gym task, the same in every process; metadata carries the entry to verify."""
    request = {"task": task, "options": dict(options), "size": size, "seed": seed}
    # -P: this directory must not come first on the import path.
    try:
        result = subprocess.run(
            [sys.executable, "-P", str(Path(__file__).with_name("generate.py"))],
            input=json.dumps(request).encode(),
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            check=False,
            timeout=GENERATE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"reasoning_gym did not generate {size} entries of {task} with {dict(options)} within {error.timeout:.0f} "
            "s. Lower data.size, or change data.task_options: with some values no entry fits."
        ) from error
    if result.returncode != 0:
        last = (result.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise BackendError(
            f"reasoning_gym failed while it generated {size} entries of {task} with {dict(options)}: {last}. "
            "Change data.task_options, or choose another data.task."
        )
    entries = pickle.loads(result.stdout)
    if isinstance(entries, str):
        raise ConfigError(entries)
    return [
        Question(
            entry["question"],
            entry["answer"] or "",
            f"{task} entry {i}",
            {"task": task, "task_options": dict(options), "entry": entry},
        )
        for i, entry in enumerate(entries)
    ]
