import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from megatron_rl import cluster, pools
from megatron_rl.errors import BackendError, ConfigError, SyncError

pytestmark = pytest.mark.live


class Process:
    """Does what it is told."""

    def __init__(self, fault: str = "") -> None:
        if fault == "ours":
            raise ConfigError("tp=3 is impossible.\nSet tp to 2.")
        if fault == "other":
            raise ZeroDivisionError("nothing to divide by")
        print("hello from the constructor", flush=True)

    def do(self, what: str) -> str:
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "ours":
            raise ConfigError("tp=3 is impossible. Set tp to 2.")
        if what == "lose a peer":
            raise BackendError("engine-0 ended: gloo: Connection closed by peer [10.0.0.1]:5")
        if what == "end":
            time.sleep(cluster.GRACE_S + 1)  # its peers notice long before
            raise BackendError("engine-0-part-1 ended.")
        if what == "theirs":
            raise SyncError("engine 0 rank 1 ended.")
        if what == "sleep":
            time.sleep(1000)
        return what


@pytest.fixture(scope="module")
def pool() -> Iterator[pools.Pool]:
    cluster.start(address=None, cpus=2)
    yield pools.Pool("trainer", 2, cpus=1)
    cluster.stop()


def test_an_address_that_ray_does_not_understand_is_refused_with_the_mend() -> None:
    """In a process of its own, as others below: this one may be connected."""
    program = "from megatron_rl import cluster\ncluster.start(address='here', cpus=1)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert re.search("ConfigError: .*cannot connect to cluster.address=here: .*HOST:PORT", done.stderr), done.stderr


def started(pool: pools.Pool, logs: Path, count: int) -> list[Any]:
    """Actors that are there: what they are then told to do takes the time that it says."""
    actors = [pool.spawn(Process, index=i, log=logs / f"trainer-{i}.log") for i in range(count)]
    ray.get([actor.do.remote("nothing") for actor in actors])
    return actors


def call(pool: pools.Pool, logs: Path, orders: list[str], *, timeout_s: float = 120.0, late: str = "wait") -> list[str]:
    actors = started(pool, logs, len(orders))
    calls = {f"trainer-{i}": a.do.remote(order) for i, (a, order) in enumerate(zip(actors, orders, strict=True))}
    try:
        return cluster.gather(calls, what="Step 3", timeout_s=timeout_s, logs=logs, late=late)
    finally:
        for actor in actors:  # the pool has one place for each
            ray.kill(actor)


def test_results_come_in_order_and_output_goes_to_the_log(pool: pools.Pool, tmp_path: Path) -> None:
    assert call(pool, tmp_path, ["a", "b"]) == ["a", "b"]
    assert (tmp_path / "trainer-1.log").read_text() == "hello from the constructor\n"


def test_a_dead_process_is_named_while_others_wait(pool: pools.Pool, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"(?s)Step 3: trainer-1 died.*hello from the constructor.*Resume"):
        call(pool, tmp_path, ["sleep", "die"])


def test_who_loses_a_peer_is_not_taken_for_the_cause(pool: pools.Pool, tmp_path: Path) -> None:
    """Also where its end is told later than those of peers that fail with a cause of their own would be waited for."""
    with pytest.raises(BackendError, match="engine-0-part-1 ended"):
        call(pool, tmp_path, ["lose a peer", "end"])
    with pytest.raises(BackendError, match="Connection closed by peer"):
        call(pool, tmp_path, ["lose a peer", "a"])


def test_a_watched_process_that_ends_ends_the_wait_for_others(pool: pools.Pool, tmp_path: Path) -> None:
    waiting, watched = started(pool, tmp_path, 2)
    calls, watches = {"engine-0": waiting.do.remote("sleep")}, {"engine-0-part-1": watched.do.remote("end")}

    with pytest.raises(BackendError, match="engine-0-part-1 ended"):
        cluster.gather(calls, what="Generating", timeout_s=120.0, watched=watches)

    for actor in (waiting, watched):
        ray.kill(actor)


def test_an_error_of_ours_arrives_as_itself(pool: pools.Pool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tp=3 is impossible. Set tp to 2."):
        call(pool, tmp_path, ["a", "ours"])


def test_errors_that_differ_are_all_told_and_equal_ones_once(pool: pools.Pool, tmp_path: Path) -> None:
    for orders in (["ours", "theirs"], ["theirs", "ours"]):
        with pytest.raises((ConfigError, SyncError)) as raised:
            call(pool, tmp_path, orders)
        assert sorted(str(raised.value).split("\n")) == ["engine 0 rank 1 ended.", "tp=3 is impossible. Set tp to 2."]
    with pytest.raises(SyncError, match=r"\Aengine 0 rank 1 ended\.\Z"):
        call(pool, tmp_path, ["theirs", "theirs"])


def test_who_has_not_ended_is_known_whether_others_failed_or_not(pool: pools.Pool, tmp_path: Path) -> None:
    actors = started(pool, tmp_path, 2)
    calls = {"trainer-0": actors[0].do.remote("sleep"), "trainer-1": actors[1].do.remote("ours")}

    try:
        with pytest.raises(ConfigError):
            cluster.gather(calls, what="Step 3", timeout_s=120.0)
        assert cluster.still_running(calls, 0.1) == ["trainer-0"]
        assert cluster.still_running({}, 10.0) == []
    finally:
        for actor in actors:
            ray.kill(actor)
    assert cluster.still_running(calls, 60.0) == []


def test_no_answer_in_time_names_who_is_missing(pool: pools.Pool, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no answer from trainer-0 within 5 s.*Resume.*; look at b"):
        call(pool, tmp_path, ["sleep", "b"], timeout_s=5.0, late="look at b")


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("ours", ConfigError, "trainer-0 could not start: ConfigError: tp=3 is impossible.\nSet tp to 2."),
        ("other", BackendError, "trainer-0 could not start: ZeroDivisionError: nothing to divide by"),
    ],
)
def test_a_constructor_that_raises_is_told_apart_from_a_death(
    pool: pools.Pool, tmp_path: Path, fault: str, kind: type, message: str
) -> None:
    actor = pool.spawn(Process, fault, index=0, log=tmp_path / "trainer-0.log")

    with pytest.raises(kind, match=message):
        cluster.gather({"trainer-0": actor.do.remote("a")}, what="Starting", timeout_s=120.0, logs=tmp_path)


def test_what_the_cluster_does_not_have_is_refused_with_what_it_has(pool: pools.Pool) -> None:
    with pytest.raises(BackendError, match=r"rollout needs 3 x .*CPU.*Nodes: .*: 2 CPU, 0 GPU"):
        pools.Pool("rollout", 3, cpus=4, timeout_s=1.0)


def test_a_user_without_a_home_is_named_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a number for a user."""

    def init(**_: Any) -> None:
        raise RuntimeError("Could not determine home directory.")  # pathlib's words, which Ray passes on

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(BackendError, match=rf"user {os.getuid()} has none: Could not .*\. Set HOME to a directory"):
        cluster.start(address=None, cpus=1)


def test_a_directory_too_deep_for_rays_sockets_is_named_with_the_mend() -> None:
    """As a batch system's TMPDIR may be."""
    program = "from megatron_rl import cluster\ncluster.start(address=None, cpus=1)"
    environment = {**os.environ, "RAY_TMPDIR": f"/tmp/{'deep' * 20}"}

    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)

    assert "BackendError: Ray cannot make its sockets: " in done.stderr
    assert "Set RAY_TMPDIR to a directory with a short name" in done.stderr


RAYLET_DIES = """
import time, psutil, ray
from megatron_rl import cluster
cluster.start(address=None, cpus=1)
(raylet,) = (p for p in psutil.Process().children() if p.name() == "raylet")
raylet.kill()
for i in range(600):
    ray.put(bytes(1_000_000))
    time.sleep(0.1)
"""


def test_that_ray_ends_the_program_with_its_raylet_is_said() -> None:
    """Ray's own way is to leave without a word, and nothing of Python runs any more."""
    done = subprocess.run([sys.executable, "-c", RAYLET_DIES], capture_output=True, text=True, check=False)

    assert done.returncode == 1, done
    assert "failed: the program was killed, by" in done.stderr and "Resume with the same command" in done.stderr


INTERRUPTED = """
import os, signal, time, psutil
from ray._private.node import Node
from megatron_rl import cluster

start = Node.start_ray_processes

def interrupted(node):
    start(node)
    while not any(p.children() for p in psutil.Process().children() if p.name() == "raylet"):
        time.sleep(0.01)
    print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

Node.start_ray_processes = interrupted
cluster.start(address=None, cpus=1)
print("started")
"""


def test_a_start_that_is_interrupted_leaves_no_process() -> None:
    """Ray's agents would look for their raylet for a minute."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)

    assert done.returncode and "started" not in done.stdout, done
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) >= 3, done  # GCS server, raylet, and an agent
    deadline = time.monotonic() + 30  # of the minute that they would take
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def runs(pid: int) -> bool:
    """In a container, nobody may ask for the ends of those that have lost their parents."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
