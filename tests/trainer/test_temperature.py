"""The temperature of sampling is that of the policy's log-probabilities."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.config import SamplingConfig
from megatron_rl.trainer.rank_batch import split
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_batch, make_config, make_rollouts, start, write_checkpoint

LENGTHS, PROMPTS = [11, 23, 20], [3, 7, 4]
SCHEDULE = ((((0, 1), (2,)),),)


def policy_and_demonstration(rank: int, directory: str, config: Any, meeting: str) -> Any:
    worker = start(rank, config, directory, meeting)
    part = split(make_batch(make_rollouts(LENGTHS, PROMPTS), SCHEDULE), 1)[0]
    policy = worker.logprobs(part).old
    worker.begin("sft")
    return policy, worker.logprobs(part).old


def test_the_policy_is_taken_at_the_temperature_it_was_sampled_at(tmp_path: Path) -> None:
    import transformers

    directory = write_checkpoint(tmp_path / "hf", "qwen3_moe")
    config = make_config(algorithm={"mini_batches": 2})
    config.sampling = SamplingConfig(max_tokens=8, temperature=0.7)

    ((policy, demonstration),) = run_ranks(1, policy_and_demonstration, directory, config, f"file://{tmp_path}/meeting")

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for found, temperature in ((policy, 0.7), (demonstration, 1.0)):
        want = []
        for i, start_of_answer in enumerate(PROMPTS):
            tokens = torch.from_numpy(np.array(make_rollouts(LENGTHS, PROMPTS).row(i)[0], np.int64))
            with torch.no_grad():
                logprobs = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
            want.append(logprobs.gather(1, tokens[1:, None])[start_of_answer - 1 :, 0])
        np.testing.assert_allclose(found, torch.cat(want), atol=2e-5)  # log-probs near -4, float32
