"""The driver's side over Ray, with two real servers: order, balance, scores, a push, and engines that die."""

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from safetensors.torch import load_file

from megatron_rl import cluster, pools
from megatron_rl.config import RewardConfig, RolloutConfig, SamplingConfig
from megatron_rl.errors import BackendError, DataError, SyncError
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.resharding.spec import Push, SendReport, SyncSpec
from megatron_rl.resharding.sync import EngineSync
from megatron_rl.rollout.fleet import Fleet
from megatron_rl.rollout.samples import read_samples
from megatron_rl.rollout.scorer import Scoring
from megatron_rl.rollout.server import Request
from megatron_rl.trainer.trainer import MegatronTrainer
from megatron_rl.trainer.worker import Worker
from megatron_rl.types import Prompt
from tests.resharding.pushing import before_offer, flip_a_bit
from tests.rollout.pushes import LIMIT_S, WAITING, RankHere
from tests.rollout.servers import START_TIMEOUT_S, checkpoint, hf_config, schedulers
from tests.trainer.setup import make_config

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

ENGINES = 2
RANKS = 2
SOON_S = 30.0
PROMPTS = [Prompt(id=f"p{i}", text=f"p{i}", tokens=tuple(range(3, 5 + i)), answer="a") for i in range(10)]


@dataclass(frozen=True, slots=True)
class Setting:
    fleet: Fleet
    path: Path
    logs: Path
    samples: Path
    scoring: Scoring


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    directory = tmp_path_factory.mktemp("fleet")
    path = checkpoint(directory, "qwen3_moe", dtype="float32", seed=1)
    cluster.start(address=None, cpus=ENGINES + RANKS + 1)
    try:
        rollout = RolloutConfig(
            engines=ENGINES, dtype="float32", max_running_requests=8, start_timeout_s=START_TIMEOUT_S
        )
        places = [pools.Pool("rollout", ENGINES, cpus=1), pools.Pool("scorer", 1, cpus=1)]
        sampling = SamplingConfig(max_tokens=8)
        fleet = Fleet(rollout, sampling, path, context_length=1024, pool=places[0], logs=directory)
        fleet.ready()
        samples = directory / "samples.jsonl"
        scoring = Scoring(RewardConfig(name="exact"), path, samples, pool=places[1], logs=directory)
        yield Setting(fleet, path, directory, samples, scoring)
    finally:
        cluster.stop()


def spec_of(path: Path) -> SyncSpec:
    trainer = MegatronTopology(world_size=1, num_layers=4)
    return SyncSpec(hf_config(path), trainer, SglangTopology(), "float32", "float32", engines=ENGINES)


def test_samples_come_in_order_and_again_with_the_same_seed(setting: Setting) -> None:
    first, again, other = (setting.fleet.generate(PROMPTS, samples_per_prompt=3, seed=s) for s in (1, 1, 2))

    assert [(s.prompt_id, s.group) for s in first] == [(f"p{i}", i) for i in range(10) for _ in range(3)]
    assert all(s.prompt_tokens == len(PROMPTS[s.group].tokens) and s.version == 0 for s in first)
    tokens = [[ray.get(s.rollouts).row(s.row)[0].tolist() for s in samples] for samples in (first, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    for sample, row in zip(first, tokens[0], strict=True):
        assert tuple(row[: sample.prompt_tokens]) == PROMPTS[sample.group].tokens
        assert len(row) == sample.prompt_tokens + sample.response_tokens


def test_both_engines_work_and_none_has_more_than_it_can_run(setting: Setting) -> None:
    samples = setting.fleet.generate(PROMPTS, samples_per_prompt=3, seed=3)

    requests = Counter(s.rollouts for s in samples)
    assert max(requests.values()) <= 6  # 2 groups of 3 fit max_running_requests=8
    assert len(requests) >= 5


def test_a_prompt_without_room_for_an_answer_is_refused_before_sending(setting: Setting) -> None:
    long = Prompt(id="long", text="", tokens=(5,) * 1015, answer="")

    with pytest.raises(DataError, match="Prompt long has 1015 tokens.*max_tokens=8.*room for 1014"):
        setting.fleet.generate([long], samples_per_prompt=1, seed=0)


def test_the_longest_prompt_gets_all_of_its_answer(setting: Setting) -> None:
    """Of the context SGLang keeps two tokens from an answer, which it cuts short without a word."""
    longest = Prompt(id="longest", text="", tokens=(5,) * 1014, answer="")

    samples = setting.fleet.generate([longest], samples_per_prompt=8, seed=0)

    assert "length" in {s.finish for s in samples}
    assert all(s.response_tokens == 8 for s in samples if s.finish == "length")


def test_scored_samples_are_recorded_and_replayed(setting: Setting) -> None:
    samples = setting.fleet.generate(PROMPTS, samples_per_prompt=2, seed=4)

    judged = setting.scoring(samples, PROMPTS, step=3)
    setting.scoring(samples, PROMPTS, step=3, split="eval")

    records = [json.loads(line) for line in setting.samples.read_text().splitlines()]
    assert [r["split"] for r in records] == ["train"] * 20 + ["eval"] * 20
    assert [s.reward for s in judged] == [float(r["response"].strip() == "a") for r in records[:20]]
    ((step, replayed),) = read_samples(setting.samples)
    assert step == 3
    for old, new in zip(judged, replayed, strict=True):
        (tokens, logprobs, length), (again, again_logprobs, _) = (
            ray.get(old.rollouts).row(old.row), new.rollouts.row(new.row)
        )  # fmt: skip
        assert tokens.tobytes() == again.tobytes() and logprobs.tobytes() == again_logprobs.tobytes()
        assert length == new.prompt_tokens and (old.reward, old.finish) == (new.reward, new.finish)


def test_a_push_reaches_both_engines_and_a_damaged_one_leaves_them_paused(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = checkpoint(tmp_path, "qwen3_moe", dtype="float32", seed=2)
    spec = spec_of(setting.path)
    before = setting.fleet.generate(PROMPTS, samples_per_prompt=1, seed=5)

    sync, back = (EngineSync(RankHere(path, spec), setting.fleet, spec, **WAITING) for path in (other, setting.path))
    metrics = sync.push(version=7)
    pushed = setting.fleet.generate(PROMPTS, samples_per_prompt=1, seed=5)
    with monkeypatch.context() as patch:
        flip_a_bit(patch)
        with pytest.raises(
            SyncError, match=r"engine-\d did not take the weights.*engine \d rank 0.*trainer rank 0.*checksum"
        ):
            back.push(version=8)
    with pytest.raises(SyncError, match="may hold a mixture of weights"):
        setting.fleet.generate(PROMPTS, samples_per_prompt=1, seed=5)
    back.push(version=9)
    healed = setting.fleet.generate(PROMPTS, samples_per_prompt=1, seed=5)

    weights = sum(t.nbytes for t in load_file(other / "model.safetensors").values())
    assert metrics["sync/bytes_received"] == metrics["sync/bytes_needed"] == ENGINES * weights
    assert ({s.version for s in pushed}, {s.version for s in healed}) == ({7}, {9})
    rows = [[ray.get(s.rollouts).row(s.row)[0].tolist() for s in samples] for samples in (before, pushed, healed)]
    assert rows[0] == rows[2] != rows[1]


class Killer(Worker):
    """Its second rank kills the process whose pid the file `victim` beside the model holds, in the middle of a push."""

    def send_weights(self, spec: SyncSpec, push: Push) -> SendReport:
        victim = self.source / "victim"
        with pytest.MonkeyPatch.context() as patch:
            if self.rank == 1 and victim.exists():
                pid = int(victim.read_text())
                victim.unlink()
                before_offer(patch, 3, lambda: os.kill(pid, signal.SIGKILL))
            return super().send_weights(spec, push)


class KillingTrainer(MegatronTrainer):
    worker = Killer


def dies_in_a_push(setting: Setting, sync: EngineSync, version: int, pid: int, match: str) -> None:
    """The process ends in the middle of the push, which says so soon, and leaves no engine generating."""
    (setting.path / "victim").write_text(str(pid))
    begin = time.monotonic()
    with pytest.raises((SyncError, BackendError), match=match):
        sync.push(version=version)
    assert time.monotonic() - begin < SOON_S
    for server in setting.fleet._servers.values():
        with pytest.raises(SyncError, match="may hold a mixture of weights"):
            ray.get(server.generate.remote(Request(((5, 6),), 1, (0,), max_tokens=1, temperature=0.0)))


def test_who_is_killed_in_the_middle_of_a_push_is_named_and_what_takes_its_place_is_pushed_to(setting: Setting) -> None:
    """One test: each start takes seconds."""
    before = setting.fleet.generate(PROMPTS, samples_per_prompt=1, seed=5)
    spec = spec_of(setting.path)
    two = replace(spec, trainer=MegatronTopology(world_size=RANKS, ep=2, num_layers=4), bucket_bytes=1 << 14)
    config, pool = make_config({"ep": 2}, world_size=RANKS), pools.Pool("trainer", RANKS, cpus=1)
    trainer = KillingTrainer(config, setting.path, pool=pool, logs=setting.logs)
    trainer.ready()
    wait = partial(cluster.gather, what="Weight sync", timeout_s=LIMIT_S, logs=setting.logs)
    sync = EngineSync(trainer, setting.fleet, two, gather=wait, still_running=cluster.still_running)

    sync.push(version=20)
    engine = setting.fleet._servers["engine-0"]
    (scheduler,) = schedulers(ray.get(engine.pid.remote()))
    named = r"engine 0 rank 0 ended in the middle of a weight update.*Resume with the same command"
    dies_in_a_push(setting, sync, 21, scheduler, named)
    with pytest.raises(SyncError, match="engine-0 did not pause: engine-0 ended (?s:.*)Resume with the same command"):
        sync.push(version=22)
    ray.get(engine.stop.remote())
    ray.get(engine.start.remote())
    metrics = sync.push(version=23)
    healed = [setting.fleet.generate(PROMPTS, samples_per_prompt=1, seed=5)]

    rank = ray.get(trainer._actors[1].pid.remote())
    dies_in_a_push(setting, sync, 24, rank, r"(?s)Weight sync: trainer-1 died\..*Resume with the same command")
    trainer.stop()
    EngineSync(RankHere(setting.path, spec), setting.fleet, spec, **WAITING).push(version=25)
    healed.append(setting.fleet.generate(PROMPTS, samples_per_prompt=1, seed=5))

    assert metrics["sync/bytes_received"] == metrics["sync/bytes_needed"]
    assert [{s.version for s in samples} for samples in healed] == [{23}, {25}]
    rows = [[ray.get(s.rollouts).row(s.row)[0].tolist() for s in samples] for samples in (before, *healed)]
    assert rows[0] == rows[1] == rows[2]


class DiesBeforeCommit:
    """A fleet whose last engine ends when all have loaded. Satisfies `sync.WeightReceiver`."""

    def __init__(self, fleet: Fleet, pid: int):
        self.fleet, self.pid, self.pause, self.loading = fleet, pid, fleet.pause, fleet.loading

    def commit(self, version: int) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.fleet.commit(version)


def test_engines_that_die_are_named_and_leave_no_process(setting: Setting) -> None:
    """Last: the fleet does not survive it."""
    ours = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends workers that are idle
            if process.status() != psutil.STATUS_ZOMBIE:
                ours[process] = " ".join(process.cmdline()).strip()
    launched = {p for p, line in ours.items() if "megatron_rl.rollout.launch" in line}
    servers = {p.pid: p for p in launched if ours.get(p.parent(), "").startswith("ray::")}
    waiting = [p for p, line in ours.items() if line in {f"megatron-rl: waits for the end of {pid}" for pid in servers}]
    assert len(servers) == len(waiting) == ENGINES
    children = [pid for server in servers for pid in schedulers(server)]
    first, second = (ray.get(setting.fleet._servers[f"engine-{i}"].pid.remote()) for i in range(ENGINES))
    spec = spec_of(setting.path)
    dying = DiesBeforeCommit(setting.fleet, second)

    with pytest.raises(SyncError, match=r"(?s)engine-1 did not commit version 30: engine-1 ended .*exit code -9"):
        EngineSync(RankHere(setting.path, spec), dying, spec, **WAITING).push(version=30)
    with pytest.raises(SyncError, match="engine-0 may hold a mixture of weights"):  # it has all of one version, alone
        ray.get(setting.fleet._servers["engine-0"].generate.remote(Request(((5, 6),), 1, (0,), 1, 0.0)))

    os.kill(servers[first].ppid(), signal.SIGKILL)
    with pytest.raises(BackendError, match=r"engine-0 died"):
        setting.fleet.pause()
    _, alive = psutil.wait_procs([*servers.values(), *waiting, *map(psutil.Process, children)], timeout=60)
    assert alive == []
