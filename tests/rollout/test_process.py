"""What a server's log says went wrong, when a start is tried again, and that nothing outlives an owner."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.errors import BackendError
from megatron_rl.rollout import launch
from megatron_rl.rollout.options import ServerSettings
from megatron_rl.rollout.process import START_ATTEMPTS, ServerProcess, free_ports
from megatron_rl.rollout.server_log import server_error


def test_the_error_of_a_traceback_is_found_among_other_lines() -> None:
    log = """[2026-01-01 00:00:00] INFO: starting
[2026-01-01 00:00:01] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    x()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.

[2026-01-01 00:00:02] Received sigquit from a child process.
"""

    assert server_error(log) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."


def test_an_error_is_told_once_and_the_last_come_last() -> None:
    log = "ValueError: first\nRuntimeError: second\nValueError: first\n"

    assert server_error(log) == "ValueError: first\nRuntimeError: second"


def test_a_log_without_an_error_shows_its_end() -> None:
    assert server_error("\n".join(str(i) for i in range(40))) == "\n".join(str(i) for i in range(25, 40))


def test_what_sglang_says_of_a_killed_scheduler_is_kept() -> None:
    killed = (
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). A common cause is the OOM killer."
    )

    assert server_error(f"INFO: starting\n[2026-01-01 00:00:00] {killed}\nINFO: bye") == killed


def test_a_port_that_cannot_be_bound_is_an_error() -> None:
    log = "[2026-01-01 00:00:00] ERROR:    [Errno 98] error while binding ('127.0.0.1', 5): address already in use"

    assert server_error(log) == "ERROR:    [Errno 98] error while binding ('127.0.0.1', 5): address already in use"


def test_a_refused_option_is_told_without_the_page_of_usage() -> None:
    log = "usage: sglang serve [--tp N]\n   [--config C]\nsglang serve: error: argument --tp: invalid int value: 'x'\n"

    assert server_error(log) == "error: argument --tp: invalid int value: 'x'"


def test_what_ends_first_is_named_and_errors_from_before_a_call_are_not(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"

    class Shell(ServerProcess):
        def _start(self, port: int) -> None:
            script = "for i in 0 1; do (exec -a sglang::scheduler_TP$i sleep 1000) & done; echo KeyError: old; "
            script += "exec sleep 1000"
            with log.open("wb") as output:
                self.server = subprocess.Popen(["bash", "-c", script], stdout=output, start_new_session=True)
            self.pid = self.server.pid
            threading.Thread(target=self.wait_for_its_end, daemon=True).start()

        def wait_for_its_end(self) -> None:
            self._exit_code = self.server.wait()
            self._ended.set()

        def _wait_until_healthy(self) -> None:
            while sum(" ".join(p.cmdline()).startswith("sglang::") for p in self.children()) < 2 or not self.log_bytes:
                time.sleep(0.01)

        def children(self) -> list[psutil.Process]:
            return psutil.Process(self.pid).children()

    server = Shell(ServerSettings(name="engine-0", model_path="/m", log_path=str(log), device="cpu"))
    since = server.log_bytes
    with log.open("a") as output:
        output.write("ValueError: this one\n")
    first, second = server.children()
    second.kill()
    with pytest.raises(BackendError, match=r"engine-0 ended: sglang::scheduler_TP1 1000 is gone\.\s"):
        server.watch()
    first.kill()

    told = "sglang::scheduler_TP1 1000 is gone. ValueError: this one\nIt ended with exit code -9. Its log"
    assert server.error_text(since).startswith(told)  # that it ended, too, though who asks knew it before
    assert "KeyError: old" in server.error_text()
    server.stop()


@pytest.mark.parametrize(
    ("raised", "nodes", "starts"), [(BackendError, 1, START_ATTEMPTS), (KeyboardInterrupt, 1, 1), (BackendError, 2, 1)]
)
def test_only_a_whole_server_without_its_port_is_started_again(
    tmp_path: Path, raised: type[BaseException], nodes: int, starts: int
) -> None:
    log = tmp_path / "engine-0.log"
    started = []

    class WithoutPort(ServerProcess):
        def _start(self, port: int) -> None:
            started.append(port)
            log.write_text("ERROR: address already in use")
            raise raised("it did not start")

    with pytest.raises(raised):
        WithoutPort(ServerSettings(name="engine-0", model_path="/m", log_path=str(log), device="cpu", nodes=nodes))
    assert len(started) == starts


def test_ports_in_a_row_are_free_and_none_that_the_system_hands_out() -> None:
    first = free_ports("127.0.0.1", count=3)

    assert first + 3 <= int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in range(first, first + 3):
        with socket.create_server(("127.0.0.1", port)):
            pass


OWNER = """
import os, subprocess, sys, time
server = "import os, subprocess, sys, time; from megatron_rl.rollout.launch import follow; follow(os.getppid()); " \
    "print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"
subprocess.run([sys.executable, "-c", server], start_new_session=True)
"""


@pytest.mark.parametrize("victim", ["owner", "server"])
def test_a_process_of_the_server_that_does_not_follow_its_parent_ends_too(victim: str) -> None:
    """As one of SGLang's does not while it still imports."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    server = child.parent()
    assert server is not None

    os.kill(owner.pid if victim == "owner" else server.pid, signal.SIGKILL)

    deadline = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    owner.wait()


@pytest.mark.parametrize("variable", ["FIRST", "SECOND"])
def test_processes_of_a_server_can_set_their_titles_whatever_it_does_to_its_environment(variable: str) -> None:
    program = f"""if True:
        import os
        from megatron_rl.rollout.launch import follow
        follow(os.getppid())
        os.environ["{variable}"] = "a longer value, which lies elsewhere"
        import setproctitle
        if os.fork() == 0:
            setproctitle.setproctitle("sglang::scheduler")
            print(open("/proc/self/cmdline").read().rstrip(chr(0)), flush=True)
            os._exit(0)
        os.wait()
    """
    environment = {"FIRST": "1", "SECOND": "2", "PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, start_new_session=True
    )

    assert done.stdout == "sglang::scheduler\n", done.stderr


def test_a_group_is_gone_when_none_of_it_runs_whether_somebody_asks_for_its_end_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container whose first process is not made for that."""
    monkeypatch.setattr(launch, "GRACE_S", 1e6)  # it would wait for ever
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    process.kill()

    launch.end_group(process.pid)

    os.killpg(process.pid, 0)  # it is there, as far as this call sees
    process.wait()
