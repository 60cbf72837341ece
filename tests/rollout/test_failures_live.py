"""Servers that fail: each ends in one clear error, and leaves no process and no shared memory behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.errors import BackendError
from megatron_rl.rollout.options import ServerSettings
from megatron_rl.rollout.server import Request, Server
from tests.rollout.servers import checkpoint, running, titled

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("failures"), "qwen3_moe", dtype="float32", seed=1)


def members(group: int) -> list[int]:
    """Pids of the processes of a process group that still run."""
    alive = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                alive.append(process.pid)
        except ProcessLookupError:
            continue
    return alive


@pytest.fixture
def names_before() -> set[str]:
    """Other servers of this process, and what earlier ones with the same numbers may have left."""
    return names()


def names() -> set[str]:
    """Of shared memory and temporary directories."""
    return {*os.listdir("/dev/shm"), *os.listdir(tempfile.gettempdir())}


def leftovers(pids: list[int], before: set[str]) -> list[str]:
    """New names that hold the number of one of these processes."""
    return [n for n in names() - before if {str(pid) for pid in pids} & set(re.split("[-_]", n))]


def wait_until_gone(group: int, *, timeout_s: float = 60.0) -> list[int]:
    """The group's processes after at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (alive := members(group)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def test_a_directory_without_a_model_is_named_by_the_servers_own_error(path: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()

    with pytest.raises(BackendError, match=r"(?s)engine-empty did not start: .*empty.*exit code"), running(empty):
        raise AssertionError("it started")


def test_a_taken_port_is_named(path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(BackendError, match=rf"(?s)did not start: .*{port}.*in use"), running(path, port=port):
            raise AssertionError("it started")


def test_a_start_that_takes_too_long_is_ended(path: Path) -> None:
    with pytest.raises(BackendError, match="start_timeout_s=2"), running(path, start_timeout_s=2.0):
        raise AssertionError("it started")


def test_a_server_whose_detokenizer_is_killed_ends_and_is_reported_with_its_log(
    path: Path, names_before: set[str]
) -> None:
    """By itself it would wait for it until the request's time is over. That of the server: tests/program."""
    with running(path) as server:
        pid = server.pid()
        pids = members(pid)
        (victim,) = titled(pid, "sglang::detokenizer")
        threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()
        long = Request(((5, 6, 7),) * 8, 1, tuple(range(8)), max_tokens=900, temperature=1.0)

        with pytest.raises(
            BackendError, match=r"(?s)ended during /generate: sglang::detokenizer is gone\.\s.*exit code -9.*\.log"
        ):
            for _ in range(50):
                server.generate(long)

        assert wait_until_gone(pid) == []
    assert leftovers([*pids, os.getpid()], names_before) == []


def test_a_server_ends_with_an_owner_that_is_killed(path: Path, tmp_path: Path, names_before: set[str]) -> None:
    program = """
        import sys, time
        from pathlib import Path
        from tests.rollout.servers import running
        with running(Path(sys.argv[1]), log_path=sys.argv[2]) as server:
            print(server.pid(), flush=True)
            time.sleep(600)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(path), str(tmp_path / "engine.log")]
    owner = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        group = int(owner.stdout.readline())
        pids = members(group)
        assert len(pids) >= 3  # the server, a scheduler, a detokenizer
    finally:
        owner.kill()
        owner.wait()

    assert wait_until_gone(group) == []
    with pytest.raises(BackendError), running(path, start_timeout_s=0.0):  # the next start sweeps
        raise AssertionError("it started")
    assert leftovers([*pids, owner.pid], names_before) == []


def test_a_stopped_server_of_two_ranks_leaves_nothing(path: Path, names_before: set[str]) -> None:
    with running(path, tp=2) as server:
        group = server.pid()
        pids = members(group)
        mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        shared = set(re.findall(r" (/dev/shm/\S+)$", mapped, re.MULTILINE))
        assert shared

    assert members(group) == []
    assert leftovers([*pids, os.getpid()], names_before) == []
    assert [name for name in shared if os.path.exists(name)] == []


def test_calls_on_a_server_that_is_not_running_say_so(path: Path) -> None:
    server = Server(ServerSettings(name="engine-0", model_path=str(path), log_path="/dev/null", device="cpu"))

    with pytest.raises(BackendError, match="engine-0 is not running"):
        server.checksums()
