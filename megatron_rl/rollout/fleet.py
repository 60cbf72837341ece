"""The driver's handle on the engines: splits prompts over them, and calls all of them for a weight update."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from megatron_rl.cluster import first_of, gather, let_end
from megatron_rl.config import RolloutConfig, SamplingConfig
from megatron_rl.errors import BackendError, DataError
from megatron_rl.formats.torch_dist import is_torch_dist
from megatron_rl.pools import Pool
from megatron_rl.resharding.spec import Push, SyncSpec
from megatron_rl.rollout.options import ServerSettings
from megatron_rl.rollout.server import Answers, Request, Server
from megatron_rl.types import Prompt, Sample

MARGIN_S = 60.0
"""What an actor gets beyond its server's own deadline, so that the server's error text arrives first."""
CONTROL_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 30.0
CONCURRENT_CALLS = 5
"""On one server: a request, beside its watch and whatever must interrupt it."""


class Fleet:
    """Satisfies `protocols.Engine` and `resharding.sync.WeightReceiver`."""

    def __init__(
        self,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        model_directory: Path,
        *,
        context_length: int,
        pool: Pool,
        logs: Path,
    ):
        """Start `rollout.engines` servers in `pool`, which has a place for each, or for each part; `ready` waits.

        `context_length` is the model's max_position_embeddings. Server i logs to `logs`/engine-i.log, its actor to
        `logs`/engine-i.actor.log; its part j on another node to `logs`/engine-i-part-j.log.
        """
        self._rollout, self._sampling, self._logs = rollout, sampling, logs
        self._longest_prompt = rollout.longest_prompt(context_length, sampling.max_tokens)
        self._version = 0
        places = pool.nodes()
        parts = len(places) // rollout.engines
        self.nodes = [node for node in places for _ in range(rollout.tp // parts)]
        """Of each rank, engine after engine."""
        self.device = "cuda" if pool.gpus else "cpu"
        self._processes: dict[str, Any] = {}
        """Of every part of every engine."""
        self._servers: dict[str, Any] = {}
        """Those that answer requests."""
        self.starting: dict[str, Any] = {}
        """What each process's start will answer, by its name."""
        for i in range(len(places)):
            settings = _settings(rollout, model_directory, device=self.device, logs=logs, place=i, parts=parts)
            log = logs / f"{settings.name}.actor.log"
            actor = pool.spawn(Server, settings, index=i, log=log, concurrency=CONCURRENT_CALLS)
            self._processes[settings.name] = actor
            if settings.part == 0:
                self._servers[settings.name] = actor
                meeting = actor.meeting.remote() if parts > 1 else None
            self.starting[settings.name] = actor.start.remote(meeting)
        self.watched: dict[str, Any] = {}
        """Calls that fail when a part of an engine ends: the others would wait for it."""

    def ready(self) -> None:
        """Wait until every server is healthy. Raises: BackendError with the server's own error text."""
        start_s = self._rollout.start_timeout_s + MARGIN_S
        gather(self.starting, what="Starting the engines", timeout_s=start_s, logs=self._logs)
        if self._processes.keys() != self._servers.keys():
            self.watched = {name: process.watch.remote() for name, process in self._processes.items()}

    def generate(self, prompts: Sequence[Prompt], *, samples_per_prompt: int, seed: int) -> list[Sample]:
        """Sample answers; group i holds `samples_per_prompt` samples of prompts[i], in order.

        Each sample has a seed of its own, made of `seed`, its group and its place in it: the same call gives the same
        tokens, on whichever engine. Raises: DataError for a prompt that leaves no room for an answer.
        """
        for prompt in prompts:
            self._check_length(prompt)
        groups: list[list[Sample]] = [[] for _ in prompts]
        pending = list(range(len(prompts)))
        running: dict[Any, tuple[str, list[int], Any]] = {}
        load = dict.fromkeys(self._servers, 0)
        while pending or running:
            for name, share in self._shares(pending, load, samples_per_prompt):
                request = self._request([prompts[g] for g in share], share, samples_per_prompt, seed)
                rollouts, answers = self._servers[name].generate.options(num_returns=2).remote(request)
                running[answers] = (name, share, rollouts)
                load[name] += len(share)
            name, share, rollouts, answers = self._next(running)
            load[name] -= len(share)
            self._check_versions(name, answers)
            for i, group in enumerate(share):
                rows = range(i * samples_per_prompt, (i + 1) * samples_per_prompt)
                groups[group] = [_sample(prompts[group], group, rollouts, answers, row) for row in rows]
        return [sample for group in groups for sample in group]

    def pause(self) -> None:
        """Stop generating on every engine."""
        self._call("pause", what="Pausing the engines")

    def loading(self, spec: SyncSpec, push: Push) -> dict[str, Any]:
        """Start to replace the weights of every engine; each call ends in the LoadReports of its ranks."""
        return {
            name: server.load_weights.remote(spec, push, engine=i)
            for i, (name, server) in enumerate(self._servers.items())
        }

    def commit(self, version: int) -> None:
        """Every engine takes the version, and when all have, they generate again: never some with it, some without."""
        self._call("commit", version, what="Committing the weights")
        self._version = version
        self._call("resume", what="Resuming the engines")

    def stop(self) -> None:
        """End every server and its actor, also where some have died."""
        calls = [process.stop.remote() for process in self._processes.values()]
        let_end(calls, timeout_s=STOP_TIMEOUT_S)
        for process in self._processes.values():
            ray.kill(process)

    def _check_length(self, prompt: Prompt) -> None:
        if len(prompt.tokens) > self._longest_prompt:
            raise DataError(
                f"Prompt {prompt.id} has {len(prompt.tokens)} tokens; beside sampling.max_tokens="
                f"{self._sampling.max_tokens} the model's context and rollout.max_total_tokens have room for "
                f"{self._longest_prompt}. Shorten it, or lower sampling.max_tokens."
            )

    def _shares(
        self, pending: list[int], load: dict[str, int], samples_per_prompt: int
    ) -> Iterator[tuple[str, list[int]]]:
        """Take groups off `pending`, each for the least loaded engine, until all engines have all they can run."""
        capacity = max(self._rollout.max_running_requests // samples_per_prompt, 1)
        shares: dict[str, list[int]] = {}
        while pending:
            name = min(load, key=lambda n: load[n] + len(shares.get(n, ())))
            if load[name] + len(shares.get(name, ())) >= capacity:
                break
            shares.setdefault(name, []).append(pending.pop(0))
        yield from shares.items()

    def _request(self, prompts: Sequence[Prompt], groups: Sequence[int], samples_per_prompt: int, seed: int) -> Request:
        return Request(
            prompts=tuple(p.tokens for p in prompts),
            samples_per_prompt=samples_per_prompt,
            seeds=tuple(sample_seed(seed, group, i) for group in groups for i in range(samples_per_prompt)),
            max_tokens=self._sampling.max_tokens,
            temperature=self._sampling.temperature,
        )

    def _next(self, running: dict[Any, tuple[str, list[int], Any]]) -> tuple[str, list[int], Any, Answers]:
        limit_s = self._rollout.request_timeout_s
        references = [*running, *self.watched.values()]
        done = first_of(references, what="Generating", timeout_s=limit_s + MARGIN_S)
        if not done:
            names = ", ".join(sorted({name for name, _, _ in running.values()}))
            raise BackendError(
                f"Generating: no answer from {names} within rollout.request_timeout_s={limit_s:.0f}. See {self._logs}."
            )
        answered = done[0] if done[0] in running else next(iter(running))
        name, share, rollouts = running.pop(answered)
        (answers,) = self._gather({name: answered}, what="Generating", timeout_s=MARGIN_S)
        return name, share, rollouts, answers

    def _check_versions(self, name: str, answers: Answers) -> None:
        wrong = set(answers.versions) - {self._version}
        if wrong:
            raise BackendError(
                f"{name} sampled with weights of version {sorted(wrong)}, and version {self._version} is committed: it "
                "was restarted or updated behind the fleet's back. Resume with the same command."
            )

    def _call(self, method: str, *args: Any, what: str) -> list[Any]:
        calls = {name: getattr(server, method).remote(*args) for name, server in self._servers.items()}
        return self._gather(calls, what=what, timeout_s=CONTROL_TIMEOUT_S)

    def _gather(self, calls: dict[str, Any], *, what: str, timeout_s: float) -> list[Any]:
        return gather(calls, what=what, timeout_s=timeout_s, logs=self._logs, watched=self.watched)


def sample_seed(seed: int, group: int, index: int) -> int:
    """63 bits that no other (seed, group, index) shares, but by chance."""
    digest = hashlib.blake2b(f"{seed}/{group}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _settings(
    rollout: RolloutConfig, model_directory: Path, *, device: str, logs: Path, place: int, parts: int
) -> ServerSettings:
    engine, part = divmod(place, parts)
    name = f"engine-{engine}" + (f"-part-{part}" if part else "")
    return ServerSettings(
        name=name,
        nodes=parts,
        part=part,
        model_path=str(model_directory),
        log_path=str(logs / f"{name}.log"),
        device=device,
        tp=rollout.tp,
        ep=rollout.ep,
        dp_attention=rollout.dp_attention,
        dp_lm_head=rollout.dp_lm_head,
        moe_dense_tp=rollout.moe_dense_tp,
        dtype=rollout.dtype,
        max_total_tokens=rollout.max_total_tokens,
        max_running_requests=rollout.max_running_requests,
        start_timeout_s=rollout.start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
        fp8=rollout.fp8,
        # A converted checkpoint holds none that SGLang reads: the first push brings all of them.
        sglang={**({"load_format": "dummy"} if is_torch_dist(model_directory) else {}), **rollout.sglang},
    )


def _sample(prompt: Prompt, group: int, rollouts: Any, answers: Answers, row: int) -> Sample:
    return Sample(
        prompt_id=prompt.id,
        group=group,
        rollouts=rollouts,
        row=row,
        prompt_tokens=len(prompt.tokens),
        response_tokens=answers.response_tokens[row],
        finish=answers.finish[row],
        version=answers.versions[row],
    )
