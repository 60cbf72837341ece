from pathlib import Path

import pytest

from megatron_rl.config_loading import load_config
from megatron_rl.controller import evaluation_due

REPLAY = ["mode=train_only", f"samples={Path(__file__)}"]


@pytest.mark.parametrize(
    ("overrides", "due"),
    [
        ([], [7]),
        (["evaluation.every=3"], [3, 6, 7]),
        (["data.held_out=0"], []),
        (["evaluation.every=3", *REPLAY], []),
    ],
)
def test_evaluations_are_due_at_the_last_step_and_in_between_where_there_is_something_to_evaluate(
    overrides: list[str], due: list[int]
) -> None:
    config = load_config(["experiment=cpu_digits", "steps=7", "evaluation.every=0", *overrides])

    assert [step for step in range(1, 8) if evaluation_due(config, step)] == due
