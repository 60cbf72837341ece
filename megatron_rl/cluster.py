"""Ray: starting it, waiting for its actors with a deadline, and saying which one died and why.

Where a process runs, `pools.py` decides.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from megatron_rl.arrangement import OBJECT_STORE_BYTES
from megatron_rl.errors import BackendError, ConfigError
from megatron_rl.failures import LOST, explain, lost_a_peer

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""To a cluster that runs already."""
KNOCK_TIMEOUT_S = 2.0
"""To a node that may be lost."""
LOOK_EVERY_S = 5.0
"""At the nodes, while waiting."""
GRACE_S = 2.0
"""After a failure, for those that come with it."""
LOST_PEER_GRACE_S = 10.0
"""After a failure that is a broken connection to a process, for the end of that one to be told on a busy machine."""
_GUARD = """
import contextlib, os, signal, sys
sys.stdin.read()  # until the driver, which has the other end, is gone
for pid in map(int, sys.argv[2:]):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
print(sys.argv[1], file=sys.stderr)
"""
_KILLED = """
failed: the program was killed, by somebody, by the system for want of memory, or by Ray, which takes it along when \
its raylet or its GCS server ends. Resume with the same command."""
_guards: list[subprocess.Popen[bytes]] = []
_nodes: set[str] = set()
"""Ids of those that hold processes of the run."""


def start(*, address: str | None, cpus: int) -> None:
    """Connect to the cluster at `address`, or start one on this machine that may count on `cpus` CPUs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would start workers at 15, and what they start with them: the work itself, behind everything else.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # torch takes large tensors in huge pages, which copies read faster. Ray's processes inherit it.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Ray would print its own account of a dead process over the progress display, beside ours.
    ray._private.worker._worker_logs_enabled = False
    # A thread that still waits when `stop` has ended Ray would start another, and wait in it.
    ray._private.auto_init_hook.enable_auto_connect = False
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    on_sigterm, before = signal.getsignal(signal.SIGTERM), _children()
    try:
        if address is None:
            # "local": without an address Ray would join whatever RAY_ADDRESS or an earlier `ray start` left here.
            resources = {"num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES}
            ray.init(address="local", include_dashboard=False, **resources, **common)
        else:
            _knock(address)
            ray.init(address=address, **common)
        _guards.append(_guard())
    except ValueError as error:
        raise ConfigError(
            f"Ray cannot connect to cluster.address={address}: {error}. Write HOST:PORT, as `ray start --head` prints "
            "it, or leave cluster.address null."
        ) from error
    except Exception as error:
        if not isinstance(error, OSError | RayError | RuntimeError) and type(error) is not Exception:
            raise  # of these Ray has no more precise one for a process of its own that did not start
        raise BackendError(_no_cluster(address, " ".join(str(error).split()))) from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts one of its own there, which exits without a word
        if not _guards:  # of what was started until then, agents would take a minute to end
            for process in _children() - before:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _no_cluster(address: str | None, cause: str) -> str:
    if address is not None:
        return (
            f"No Ray cluster answers at cluster.address={address}: {cause}. Start one there, or leave cluster.address "
            "null."
        )
    if "AF_UNIX path length" in cause:
        return f"Ray cannot make its sockets: {cause}. Set RAY_TMPDIR to a directory with a short name, such as /tmp."
    if "home directory" in cause:
        return (
            f"Ray keeps a token in the home directory, and user {os.getuid()} has none: {cause} Set HOME to a "
            "directory that this user can write; SGLang keeps files there, too."
        )
    return (
        f"Ray did not start on this machine: {cause} One of its processes had too little of something: time on a busy "
        "machine, memory, disk, or open files (ulimit -n); what it says lies below session_latest/logs in Ray's "
        "temporary directory (/tmp/ray). Give it more, and start the same command again."
    )


def _knock(address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Raises: OSError when nobody listens at host:port, which Ray would wait for at length."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():  # and not "auto"
        socket.create_connection((host, int(port)), timeout=timeout_s).close()


def _guard() -> subprocess.Popen[bytes]:
    """A process that says that the driver was killed, which then cannot, unless `stop` comes before.

    It also ends the agents of a raylet started here, which ends at once itself: they would take a minute.
    """
    raylets = [p for p in psutil.Process().children() if p.name() == "raylet"]
    agents = [str(child.pid) for raylet in raylets for child in raylet.children()]
    arguments = [sys.executable, "-I", "-S", "-c", _GUARD, _KILLED, *agents]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)


def watch(nodes: Iterable[str]) -> None:
    """Of these nodes, by Ray's names, the loss of one ends every wait; not of others in the cluster."""
    if not ray.util.client.ray.is_connected():  # from outside, nodes may have no address
        _nodes.update(nodes)


def stop() -> None:
    """End the connection; a cluster that `start` started ends with all its actors."""
    ray.shutdown()
    _nodes.clear()
    while _guards:
        guard = _guards.pop()
        guard.kill()
        guard.wait()


def first_of(references: Sequence[Any], *, what: str, timeout_s: float) -> list[Any]:
    """The first of the references whose call has ended, or none after `timeout_s`.

    Raises: BackendError when a node cannot be reached any more, which Ray itself may take a minute to notice.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = max(deadline - time.monotonic(), 0)
        done, _ = ray.wait(references, timeout=min(left, LOOK_EVERY_S))
        if done or left <= LOOK_EVERY_S:
            return list(done)
        if lost := _lost_nodes():
            raise BackendError(f"{what}: lost {' and '.join(lost)}, {LOST}. Resume with the same command.")


def let_end(calls: Sequence[Any], *, timeout_s: float) -> None:
    """Wait until calls have ended, well or not, but at most `timeout_s`, and not for a node that is lost."""
    deadline = time.monotonic() + timeout_s
    left = list(calls)
    with contextlib.suppress(BackendError):
        while left and (done := first_of(left, what="Stopping", timeout_s=deadline - time.monotonic())):
            left.remove(done[0])


def gather(
    calls: Mapping[str, Any],
    *,
    what: str,
    timeout_s: float,
    logs: Path | None = None,
    watched: Mapping[str, Any] = MappingProxyType({}),
    late: str = "if there was still work, with a longer trainer.*_timeout_s or rollout.*_timeout_s",
) -> list[Any]:
    """Results of `calls` (process name -> reference), in order; the first failure ends the wait.

    late: the mend where `timeout_s` passes.
    watched: calls that go on while their processes are well. One that fails ends the wait too, and is what counts.
    Raises: the call's own error if it is one of ours; BackendError naming the process when it died, failed otherwise,
    or when `timeout_s` passes. `logs` is the directory of <process name>.log files, whose tail is quoted.
    """
    deadline = time.monotonic() + timeout_s
    waiting = {ref: name for name, ref in calls.items()}
    watching = {ref: name for name, ref in watched.items()}
    failed: dict[str, Exception] = {}
    while waiting:
        done = first_of([*watching, *waiting], what=what, timeout_s=deadline - time.monotonic())
        if not done and not failed:
            names = ", ".join(sorted(waiting.values()))
            raise BackendError(
                f"{what}: no answer from {names} within {timeout_s:.0f} s. See {logs or 'its log'}. Resume with the "
                f"same command; {late}."
            )
        if not done:
            break
        for ref in done:
            name = watching.pop(ref, "") or waiting.pop(ref)
            try:
                ray.get(ref)
            except RayError as error:
                grace_s = LOST_PEER_GRACE_S if lost_a_peer(error) else GRACE_S
                deadline = min(deadline, time.monotonic() + grace_s)
                failed[name] = error
    if failed:
        first = sorted(failed.items(), key=lambda one: one[0] not in watched)
        raise explain(dict(first), what=what, logs=logs, lost=_lost_nodes())
    return ray.get(list(calls.values()))


def still_running(calls: Mapping[str, Any], timeout_s: float) -> list[str]:
    """Names of the calls that have not ended, well or not, within `timeout_s`."""
    names = {ref: name for name, ref in calls.items()}
    _, late = ray.wait(list(names), num_returns=len(names), timeout=timeout_s) if names else ([], [])
    return [names[ref] for ref in late]


def _lost_nodes() -> list[str]:
    """Nodes of the run whose Ray does not answer, before Ray itself has found that out."""
    silent = [node for node in ray.nodes() if node["NodeID"] in _nodes and not _answers(node)]
    # Asked again: once may be a moment's overload.
    return [f"{n['NodeManagerHostname']} ({n['NodeManagerAddress']})" for n in silent if not _answers(n)]


def _answers(node: Mapping[str, Any]) -> bool:
    try:
        _knock(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", timeout_s=KNOCK_TIMEOUT_S)
    except OSError:
        return False
    return True
