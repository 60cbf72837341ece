"""One arm of tools/bench_step.py: GRPO steps of TRL's GRPOTrainer on the CPU, with transformers generating.

Runs with build/bench (requirements/bench.txt) on PYTHONPATH. Usage: python tools/bench_trl.py SETTINGS_JSON OUT_JSON
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import torch
import transformers
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """When each step ended: a step is everything from one end to the next."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first step begins."""
        self.ends_s.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step ended, and the next one begins."""
        self.ends_s.append(time.perf_counter())


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1.0 for the reference answer, nothing else."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def run(s: dict[str, Any]) -> list[dict[str, float]]:
    """Seconds and mean response length of each step. `s`: see `trl_settings` of bench_step.py."""
    torch.set_num_threads(s["threads"])
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(s["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(s["model"], padding_side="left")
    rows = [json.loads(line) for line in Path(s["prompts"]).read_text().splitlines()]
    # With a fingerprint of our own: datasets would pickle pyarrow's types for one, which pyarrow 26 does not allow.
    dataset = Dataset(InMemoryTable(pyarrow.Table.from_pylist(rows)), fingerprint="bench")
    samples = s["prompts_per_step"] * s["samples_per_prompt"]
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=samples,
            num_generations=s["samples_per_prompt"],
            max_completion_length=s["max_tokens"],
            temperature=s["temperature"],
            beta=s["kl_coef"],
            learning_rate=s["lr"],
            lr_scheduler_type="constant",
            max_steps=s["steps"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    steps_s = [b - a for a, b in zip(clock.ends_s, clock.ends_s[1:], strict=False)]
    return [{"step_s": step_s, "response_tokens": tokens} for step_s, tokens in zip(steps_s, lengths, strict=True)]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(sys.argv[1]))))
