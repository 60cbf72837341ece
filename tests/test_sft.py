"""Demonstrations: the reference answer, ended, behind its prompt; only the answer is trained on."""

from typing import Any

from megatron_rl.data.prompts import Prompts
from megatron_rl.sft import demonstrations
from megatron_rl.types import Prompt

END = 9


class Digits:
    """A tokenizer: each digit is its own number."""

    eos_token_id = END

    def __call__(self, text: str, **_: Any) -> Any:
        return {"input_ids": [int(c) for c in text]}


def test_a_demonstration_is_its_prompt_and_the_ended_answer_of_which_only_the_latter_trains() -> None:
    prompts = [Prompt("a", "12", (1, 2), "345", {}), Prompt("b", "678", (6, 7, 8), "1", {})]

    first, second = demonstrations(prompts, Prompts(prompts, [], seed=0, tokenizer=Digits()))

    assert first.rollouts is second.rollouts
    rows = [first.rollouts.row(sample.row) for sample in (first, second)]
    assert [(tokens.tolist(), prompt_length) for tokens, _, prompt_length in rows] == [
        ([1, 2, 3, 4, 5, END], 2),
        ([6, 7, 8, 1, END], 3),
    ]
    assert [(s.prompt_id, s.prompt_tokens, s.response_tokens) for s in (first, second)] == [("a", 2, 4), ("b", 3, 2)]
