import os
import subprocess
import sys

import pytest

from megatron_rl.errors import BackendError, ConfigError, DataError
from megatron_rl.rewards import REWARDS, load_reward
from megatron_rl.rewards.exact import exact
from megatron_rl.rewards.judge import Judge
from megatron_rl.rewards.math_answer import math_answer
from megatron_rl.rewards.verifier import verifier
from megatron_rl.types import Prompt


def prompt(answer, **metadata):
    return Prompt(id="p0", text="?", tokens=(1,), answer=answer, metadata=metadata)


def test_exact_ignores_white_space_around_the_answer_and_nothing_else():
    assert exact(" 4 2\n", prompt("4 2")) == 1.0
    assert exact("42", prompt("4 2")) == 0.0
    assert exact("A", prompt("a")) == 0.0
    assert exact("", prompt("a")) == 0.0


@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, "1"])
def test_a_score_that_is_no_number_is_refused_with_prompt_and_response(monkeypatch, score, threshold):
    monkeypatch.setitem(REWARDS, "odd", lambda: lambda response, prompt: score)
    with pytest.raises(DataError, match=rf"reward.name=odd gave {score} to response '4 2' of prompt p0: .*Mend"):
        load_reward("odd", threshold=threshold)("4 2", prompt("a"))


def test_a_reward_that_raises_is_named_with_prompt_response_and_place(monkeypatch):
    monkeypatch.setitem(REWARDS, "odd", lambda: lambda response, prompt: float(prompt.metadata["level"]))
    with pytest.raises(DataError, match=r"odd could not judge response '42' of prompt p0: KeyError: 'level' \("):
        load_reward("odd")("42", prompt("a"))


def test_a_prompt_without_an_answer_is_refused_by_the_rewards_that_compare():
    for name in ("exact", "math"):
        with pytest.raises(DataError, match="reward.name=verifier"):
            load_reward(name)("", prompt(""))


def test_math_accepts_other_forms_of_the_same_value():
    reward = math_answer()
    assert reward(r"So it is $\boxed{\frac{2}{4}}$.", prompt("1/2")) == 1.0
    assert reward("I get 0.5.", prompt(r"\frac{1}{2}")) == 1.0
    assert reward("$1 + x^2$", prompt("x^2+1")) == 1.0
    assert reward("$(1, 2)$", prompt("(1,2)")) == 1.0
    assert reward("no number at all", prompt("no number at all")) == 1.0


def test_math_rejects_other_values_and_silence():
    reward = math_answer()
    assert reward(r"$\boxed{\frac{2}{3}}$", prompt("1/2")) == 0.0
    assert reward("", prompt("1/2")) == 0.0
    assert reward("nothing", prompt("1/2")) == 0.0


def test_math_survives_newlines_and_braces_in_a_response():
    assert math_answer()('{"a": [\n1}\n\\frac{\n the answer is 7', prompt("7")) == 1.0


def test_a_judge_that_hangs_is_killed_scored_zero_and_replaced():
    judge = Judge("math_judge.py")
    assert judge.ask("1/2", "0.5") == 1.0
    judge.timeout_s = 0.3
    first = judge.process
    subprocess.run(["kill", "-STOP", str(first.pid)], check=True)
    assert judge.ask("1/2", "$1/2$") is None
    assert first.poll() is not None
    judge.timeout_s = 15.0
    assert judge.ask("1/2", "$1/2$") == 1.0
    judge.stop()


def test_a_judge_that_died_is_replaced():
    judge = Judge("math_judge.py", timeout_s=15.0)
    judge.ask("1", "2")
    judge.process.kill()
    os.waitid(os.P_PID, judge.process.pid, os.WEXITED | os.WNOWAIT)  # nobody but the judge's owner asks for its end
    assert judge.ask("1", "$1$") is None
    assert judge.ask("1", "$1$") == 1.0
    judge.stop()


def test_a_judge_that_cannot_start_is_an_error_and_not_a_zero(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BackendError, match=r"not ready .* run it by hand"):
        math_answer()("1", prompt("1"))


def test_a_judge_ends_with_its_owner():
    judge = Judge("math_judge.py", timeout_s=15.0)
    judge.ask("1", "2")
    process = judge.process
    process.stdin.close()
    assert process.wait(timeout=20) == 0


def spelling(word):
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("spell_backward", size=1, seed=3, min_word_len=4, max_word_len=6)
    entry = dataset[0]
    entry["answer"], entry["metadata"]["word"] = word[::-1], word
    return prompt(word[::-1], task="spell_backward", task_options={"min_word_len": 4, "max_word_len": 6}, entry=entry)


def test_verifier_gives_the_tasks_own_score():
    reward = load_reward("verifier")
    assert reward("alpmit", spelling("timpla")) == 1.0
    assert 0.0 < reward("alpmix", spelling("timpla")) < 1.0  # this task gives partial credit
    assert reward("", spelling("timpla")) == 0.0


def test_threshold_turns_partial_credit_into_all_or_nothing():
    reward = load_reward("verifier", threshold=0.9)
    assert reward("alpmit", spelling("timpla")) == 1.0
    assert reward("alpmix", spelling("timpla")) == 0.0


def test_verifier_scores_zero_where_the_library_cannot_parse():
    import reasoning_gym

    # prime_factorization's parser raises ValueError on words.
    entry = reasoning_gym.create_dataset("prime_factorization", size=1, seed=0)[0]
    p = prompt(entry["answer"], task="prime_factorization", task_options={}, entry=entry)
    assert load_reward("verifier")("garbage", p) == 0.0
    assert load_reward("verifier")(entry["answer"], p) == 1.0


def test_a_response_that_its_verifier_would_compute_for_ever_scores_zero_and_the_next_is_judged():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("countdown", size=1, seed=0)[0]
    p = prompt(entry["answer"], task="countdown", task_options={}, entry=entry)
    reward = verifier(timeout_s=4.0)

    assert reward("9**9**9**9", p) == 0.0
    assert reward(entry["answer"], p) == 1.0


def test_verifier_refuses_a_prompt_that_no_task_generated():
    with pytest.raises(ConfigError, match="prompt p0.*reward.name to exact or math"):
        load_reward("verifier")("x", prompt("x"))


def test_unknown_reward_names_the_nearest():
    with pytest.raises(ConfigError, match="'exakt' is not one of exact, math, verifier. Did you mean 'exact'"):
        load_reward("exakt")
    assert set(REWARDS) == {"exact", "math", "verifier"}
