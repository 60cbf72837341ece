"""Asks verifiers of reasoning_gym, in a process of its own (judge_process.py)."""

import json
import sys
from typing import Any

import reasoning_gym

# What the library's parsers raise on text that no author of theirs thought of. The text is a model's; it earns nothing.
_PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError, RecursionError)
_TASKS: dict[str, reasoning_gym.dataset.ProceduralDataset] = {}


def judge(task: str, options: dict[str, Any], response: str, entry: dict[str, Any]) -> float:
    """The task's own score, of a task that is built once; 0.0 where its parser fails."""
    key = json.dumps([task, options], sort_keys=True)
    if key not in _TASKS:
        _TASKS[key] = reasoning_gym.create_dataset(task, size=1, seed=0, **options)
    try:
        return float(_TASKS[key].score_answer(response, entry))
    except _PARSE_ERRORS as error:
        print(f"{task} cannot parse {response!r} ({type(error).__name__}: {error}): scored 0", file=sys.stderr)
        return 0.0
