"""Prompts: questions with duplicates removed, split by content, tokenized, and dealt in a resumable random order."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config import DataConfig
from megatron_rl.data.sources import Question, read_questions
from megatron_rl.data.tokenizer import load_tokenizer, render
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the model and its context; None is without."""

    prompt_tokens: int | None = None
    """At most, of a prompt."""
    demonstration_tokens: int | None = None
    """At most, of a training prompt with its answer and end token, for supervised updates."""
    vocab_size: int | None = None
    """Tokens from here on have no embedding."""


class Prompts:
    """Training prompts without end, in an order reshuffled every epoch, and the held-out ones apart."""

    def __init__(self, train: Sequence[Prompt], held_out: Sequence[Prompt], *, seed: int, tokenizer: Any) -> None:
        """The order depends on `seed`, the epoch and the order of `train`, nothing else."""
        self.train, self.held_out = tuple(train), tuple(held_out)
        self._seed, self._tokenizer = seed, tokenizer
        self._epoch, self._cursor = 0, 0
        self._order = self._order_of(0)
        self._fingerprint = _fingerprint(self.train, self.held_out, seed)

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts; an epoch that ends within them is followed by the next."""
        taken: list[Prompt] = []
        while len(taken) < n:
            if self._cursor == len(self._order):
                self._epoch, self._cursor = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            part = self._order[self._cursor : self._cursor + n - len(taken)]
            taken += [self.train[i] for i in part]
            self._cursor += len(part)
        return taken

    def answer_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """The reference answer as the model should produce it after `prompt.tokens`: its tokens, then end of sequence.

        Raises: DataError for a prompt without an answer; ConfigError for a tokenizer without an end token.
        """
        if not prompt.answer:
            raise DataError(
                f"Prompt {prompt.id} has no reference answer to imitate: its task has many right ones. "
                "Set sft.steps=0, or choose data with answers."
            )
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                "The tokenizer has no eos_token: a model trained on answers without an end would never stop. "
                "Set eos_token in the checkpoint's tokenizer_config.json."
            )
        # Apart from the prompt: the engine, too, starts after the prompt's last token and merges nothing across it.
        return (*self._tokenizer(prompt.answer, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id)

    def state(self) -> dict[str, Any]:
        """Position, and the fingerprint of the data it belongs to."""
        return {"epoch": self._epoch, "cursor": self._cursor, "fingerprint": self._fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly after the prompts that had been taken when `state` was made.

        Raises: DataError when prompts, answers, tokenizer, split or seed are not the ones it was made with.
        """
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                f"The checkpoint was made with other prompts (fingerprint {state['fingerprint']}, now "
                f"{self._fingerprint}): going on would train on another order, and on prompts that were held out. "
                "Put back the data.* settings, the file and the tokenizer of that run, or start a new one with name=..."
            )
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self.train))


def load_prompts(
    config: DataConfig,
    tokenizer_dir: Path | str,
    *,
    limits: Limits = Limits(),
    questions: Sequence[Question] | None = None,
) -> Prompts:
    """Read, split and tokenize the configured data; `questions` replaces reading the source, where the caller did.

    Raises: DataError for malformed or too long prompts and too few of them; ConfigError for an unknown task or option.
    """
    questions = read_questions(config) if questions is None else questions
    source = config.source if config.source == "jsonl" else f"{config.source}/{config.task}"
    train, held_out = split(_distinct(questions, source), held_out=config.held_out, seed=config.seed)
    tokenizer = load_tokenizer(tokenizer_dir)
    parts = [_tokenize(part, tokenizer, config.template, limits) for part in (train, held_out)]
    prompts = Prompts(*parts, seed=config.seed, tokenizer=tokenizer)
    if limits.demonstration_tokens is not None:
        _check_demonstrations(train, prompts, tokenizer, limits)
    return prompts


def split(
    questions: Sequence[tuple[str, Question]], *, held_out: int, seed: int
) -> tuple[list[tuple[str, Question]], list[tuple[str, Question]]]:
    """(train, held out): the `held_out` questions whose seeded hash is lowest are set apart.

    Both parts come in the order of that hash, so neither depends on the order of the source.
    Raises: DataError when nothing would be left to train on.
    """
    if held_out >= len(questions):
        raise DataError(
            f"data.held_out={held_out} of {len(questions)} distinct prompts leaves none to train on. "
            "Lower data.held_out, or bring more prompts (data.size, or a longer file)."
        )
    ordered = sorted(questions, key=lambda pair: hashlib.sha256(f"{seed}:{pair[0]}".encode()).digest())
    return ordered[held_out:], ordered[:held_out]


def _distinct(questions: Sequence[Question], source: str) -> list[tuple[str, Question]]:
    """(id, question) without repeated texts; the first one stays."""
    first: dict[str, Question] = {}
    conflicts: list[Question] = []
    for question in questions:
        kept = first.setdefault(hashlib.sha256(f"{source}\0{question.text}".encode()).hexdigest()[:16], question)
        if kept.answer != question.answer:
            conflicts.append(question)
    if len(first) < len(questions):
        logger.info("removed %d repeated prompts of %d", len(questions) - len(first), len(questions))
    if conflicts:
        logger.warning(
            "%d repeated prompts have another answer than their first, which stays; one is %s",
            len(conflicts),
            conflicts[0].where,
        )
    return list(first.items())


def _tokenize(questions: Sequence[tuple[str, Question]], tokenizer: Any, template: str, limits: Limits) -> list[Prompt]:
    if not questions:
        return []
    texts = [render(question.text, template, tokenizer) for _, question in questions]
    # A chat template writes the special tokens itself.
    rows = tokenizer(texts, add_special_tokens=template != "chat")["input_ids"]
    if tokenizer.unk_token_id is not None and (unknown := sum(tokenizer.unk_token_id in row for row in rows)):
        logger.warning("%d of %d prompts hold text that the tokenizer does not know", unknown, len(rows))
    for (identity, question), row in zip(questions, rows, strict=True):
        if not row:
            raise DataError(
                f"Prompt {identity} ({question.where}) becomes no token at all: the tokenizer knows none of it. "
                "Use a checkpoint whose tokenizer knows the data's characters."
            )
        _check_vocabulary(row, f"Prompt {identity} ({question.where})", limits)
        if limits.prompt_tokens is not None and len(row) > limits.prompt_tokens:
            raise DataError(
                f"Prompt {identity} ({question.where}) has {len(row)} tokens, more than the {limits.prompt_tokens} "
                "that the context leaves beside the answer. Shorten or drop it, lower sampling.max_tokens, or use a "
                "model with a longer context."
            )
    return [
        Prompt(identity, text, tuple(row), question.answer, question.metadata)
        for (identity, question), text, row in zip(questions, texts, rows, strict=True)
    ]


def _check_demonstrations(
    questions: Sequence[tuple[str, Question]], prompts: Prompts, tokenizer: Any, limits: Limits
) -> None:
    """`questions` are those of `prompts.train`."""
    longest = limits.demonstration_tokens
    # All answers at once; `Prompts.answer_tokens` refuses a missing one.
    answers = tokenizer([p.answer for p in prompts.train], add_special_tokens=False)["input_ids"]
    for (identity, question), prompt, answer in zip(questions, prompts.train, answers, strict=True):
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        _check_vocabulary([*answer, *end], f"The answer of prompt {identity} ({question.where})", limits)
        total = len(prompt.tokens) + len(answer) + 1
        if longest is not None and total > longest:
            raise DataError(
                f"Prompt {identity} ({question.where}) has {len(prompt.tokens)} tokens and its answer {len(answer)}; "
                f"with the end token that is more than the {longest} of the model's context or a micro-batch, and "
                "a supervised sample is never cut. Shorten or drop it, raise trainer.tokens_per_micro_batch, use a "
                "model with a longer context, or do without supervised updates (sft.steps=0)."
            )


def _check_vocabulary(tokens: Sequence[int], what: str, limits: Limits) -> None:
    """No rank would say so of a token too many: over several of them it is nobody's, and becomes nothing."""
    if limits.vocab_size is not None and max(tokens) >= limits.vocab_size:
        raise DataError(
            f"{what} has token {max(tokens)}, and the model's vocabulary ends at {limits.vocab_size - 1} (vocab_size "
            "in config.json): the tokenizer is another model's, or tokens were added to it alone. Use the tokenizer "
            "that belongs to the weights."
        )


def _fingerprint(train: Sequence[Prompt], held_out: Sequence[Prompt], seed: int) -> str:
    digest = hashlib.sha256(repr((seed, len(train))).encode())
    for prompt in (*train, *held_out):
        digest.update(repr((prompt.id, prompt.answer, prompt.tokens)).encode())
    return digest.hexdigest()[:16]
