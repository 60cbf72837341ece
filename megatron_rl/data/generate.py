"""A process that generates the entries of one reasoning_gym task: a JSON request on stdin, a pickled reply on stdout.

Run as a file with PYTHONHASHSEED=0, and imports nothing of ours. It is a process of its own because several tasks walk
over sets of strings or draw from the global generator: only with a fixed hash seed are two runs given the same prompts.
"""

import dataclasses
import difflib
import json
import os
import pickle
import random
import sys
from typing import Any

import numpy as np
from reasoning_gym.factory import DATASETS

_OURS = {"size": "data.size", "seed": "data.seed"}


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def generate(task: str, options: dict[str, Any], *, size: int, seed: int) -> list[dict[str, Any]] | str:
    """The entries, or what is wrong with the request."""
    if task not in DATASETS:
        return f"data.task={task!r} is not a task of reasoning_gym.{_nearest(task, list(DATASETS))}"
    dataset_class, config_class = DATASETS[task]
    known = [field.name for field in dataclasses.fields(config_class)]
    for name in options:
        if name in _OURS:
            return f"data.task_options.{name} is set by {_OURS[name]}. Set that one instead."
        if name not in known:
            rest = ", ".join(sorted(set(known) - set(_OURS)))
            return f"data.task_options.{name} is not an option of {task} ({rest}).{_nearest(name, known)}"
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        dataset = dataset_class(config=config_class(size=size, seed=seed, **options))
    except (AssertionError, TypeError, ValueError) as error:  # how the library reports values that cannot work
        return f"data.task_options={options} cannot work for {task}: {error or type(error).__name__}."
    return [dataset[i] for i in range(size)]


if __name__ == "__main__":
    reply = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get into the reply
    pickle.dump(generate(**json.load(sys.stdin)), reply)
    reply.close()
