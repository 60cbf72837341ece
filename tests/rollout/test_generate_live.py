"""What a real server answers: log-probabilities, seeds, ends."""

import numpy as np
import pytest
import torch

from megatron_rl.rollout.server import Request
from tests.rollout.conftest import Engines
from tests.rollout.servers import END, assert_greedy_text_is_that_of_transformers

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

PROMPTS = tuple(tuple(3 + (7 * i + 11 * j) % 50 for j in range(2 + 3 * i)) for i in range(6))


def request(*, seed: int = 0, temperature: float = 1.0, max_tokens: int = 24, samples: int = 4) -> Request:
    seeds = tuple(seed + i for i in range(len(PROMPTS) * samples))
    return Request(PROMPTS, samples, seeds, max_tokens=max_tokens, temperature=temperature)


@pytest.mark.parametrize("tp", [1, 2])
def test_greedy_text_is_that_of_transformers(engines: Engines, tp: int) -> None:
    assert_greedy_text_is_that_of_transformers(engines.servers[tp], engines.path)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(engines: Engines, tp: int, temperature: float) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(engines.path, dtype=torch.float32)

    rollouts, answers = engines.servers[tp].generate(request(temperature=temperature))

    for row, count in enumerate(answers.response_tokens):
        tokens, logprobs, length = rollouts.row(row)
        assert tuple(tokens[:length]) == PROMPTS[row // 4]
        assert len(tokens) == length + count
        assert not logprobs[:length].any()
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            wanted = torch.log_softmax(model(ids[None]).logits[0] / temperature, dim=-1)
        wanted = wanted[torch.arange(length - 1, len(ids) - 1), ids[length:]]
        torch.testing.assert_close(
            torch.from_numpy(logprobs[length:]),
            wanted,
            rtol=0,
            atol=1e-5,  # float32 through four layers
        )


def test_equal_seeds_give_equal_tokens_and_other_seeds_others(engines: Engines) -> None:
    server = engines.servers[1]

    (first, _), (again, _), (other, _) = (server.generate(request(seed=s)) for s in (5, 5, 6000))

    assert first.tokens.tobytes() == again.tokens.tobytes()
    assert first.logprobs.tobytes() == again.logprobs.tobytes()
    assert first.tokens.tobytes() != other.tokens.tobytes()
    samples = {tuple(first.row(i)[0]) for i in range(4)}
    assert len(samples) == 4  # of one prompt


def test_a_response_ends_with_its_end_token_or_at_its_length(engines: Engines) -> None:
    rollouts, answers = engines.servers[1].generate(request(samples=32))

    assert set(answers.finish) == {"stop", "length"}
    for row, finish in enumerate(answers.finish):
        tokens, _, length = rollouts.row(row)
        ended = tokens[-1] == END
        assert ended if finish == "stop" else len(tokens) == length + 24
        assert END not in tokens[length:-1]


def test_samples_follow_the_distribution(engines: Engines) -> None:
    """Frequencies of the first token over 4000 seeds against its probabilities: chi-squared."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(engines.path, dtype=torch.float32)
    with torch.no_grad():
        probabilities = model(torch.tensor([PROMPTS[3]])).logits[0, -1].softmax(-1).numpy()
    count = 4000

    rollouts, _ = engines.servers[1].generate(
        Request((PROMPTS[3],), count, tuple(range(count)), max_tokens=1, temperature=1.0)
    )

    tokens = rollouts.tokens.reshape(count, -1)[:, -1]
    seen = np.bincount(tokens, minlength=len(probabilities))
    chi_squared = ((seen - count * probabilities) ** 2 / (count * probabilities)).sum()
    freedom = len(probabilities) - 1
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations
