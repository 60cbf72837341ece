"""mode=sft: the same trainer, no engine."""

import pytest
from safetensors.torch import load_file

from tests.program.conftest import World
from tests.program.program import DONE, finish
from tests.program.states import records

pytestmark = [pytest.mark.live, pytest.mark.timeout(3600)]


def test_sft_learns_the_answers_and_exports(world: World) -> None:
    path = world.runs / "finetuned"
    changes = {"mode": "sft", "sft__steps": 0, "steps": 20, "trainer__world_size": 1, "parallel__ep": 1}

    ended = finish(world.arguments("finetuned", **changes), world.output("finetuned"))

    assert ended.code == DONE, ended.text
    assert ended.left_behind == ()
    losses = [r["loss"] for r in records(path)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
    assert not (path / "samples.jsonl").exists() and not (path / "log" / "engine-0.log").exists()
    before, after = load_file(world.model / "model.safetensors"), load_file(path / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert not any(before[name].equal(after[name]) for name in before if name.endswith("proj.weight"))
