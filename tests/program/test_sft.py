"""mode=sft: the same trainer, no engine."""

import pytest
from safetensors.torch import load_file

from tests.program.conftest import World
from tests.program.program import DONE, Ended, finish
from tests.program.states import records

pytestmark = [pytest.mark.live, pytest.mark.timeout(3600)]


UNREAD = ("prompts_per_step=", "reward.", "sampling.", "algorithm.", "rollout.", "sft.steps=")
"""What this mode need not be told."""


def finetune(world: World, *, steps: int) -> Ended:
    changes = {"mode": "sft", "trainer__world_size": 1, "parallel__ep": 1}
    arguments = world.arguments("finetuned", steps=steps, **changes)
    return finish([word for word in arguments if not word.startswith(UNREAD)], world.output("finetuned"))


def test_sft_learns_the_answers_exports_and_goes_on_when_steps_are_raised(world: World) -> None:
    path = world.runs / "finetuned"

    ended = finetune(world, steps=10)

    assert ended.code == DONE, ended.text
    assert ended.left_behind == ()
    first = records(path)
    assert [r["step"] for r in first] == list(range(1, 11))
    assert not (path / "samples.jsonl").exists() and not (path / "log" / "engine-0.log").exists()
    before, after = (load_file(directory / "model.safetensors") for directory in (world.model, path / "hf"))
    assert before.keys() == after.keys()
    prediction = {name for name in before if ".layers.2." in name}
    copies = {"model.layers.2.embed_tokens.weight": "model.embed_tokens.weight"}
    copies["model.layers.2.shared_head.head.weight"] = "lm_head.weight"
    assert not any(before[n].equal(after[n]) for n in before.keys() - prediction if n.endswith("proj.weight"))
    assert all(before[name].equal(after[name]) for name in prediction - copies.keys())  # carried, not trained
    assert all(after[name].equal(after[own]) for name, own in copies.items())

    ended = finetune(world, steps=20)

    assert ended.code == DONE, ended.text
    assert "step 11/20" in ended.text and "step 10/" not in ended.text
    both = records(path)
    assert both[:10] == first
    assert [r["step"] for r in both] == list(range(1, 21))
    assert both[19]["loss"] < both[9]["loss"] < both[0]["loss"]
    assert not load_file(path / "hf" / "model.safetensors")["lm_head.weight"].equal(after["lm_head.weight"])
