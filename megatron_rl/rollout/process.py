"""One SGLang server process: its start with a deadline, its own error text, and its end with all its children."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import requests

from megatron_rl.errors import BackendError
from megatron_rl.rollout.launch import end_group
from megatron_rl.rollout.options import ServerSettings, command, without_proxy
from megatron_rl.rollout.server_log import NO_PLUGIN, PORT_TAKEN, server_error, server_errors
from megatron_rl.rollout.sglang_cpu.settings import STUBS, cpu_environment
from megatron_rl.rollout.watching import first_gone, open_processes

PLUGIN_SITE = Path(__file__).parent / "plugin_site"
POLL_S = 0.1
TEMPORARY = f"megatron-rl-engine-{os.stat('/proc/self/ns/pid').st_ino}-"
"""Of the server's TMPDIR, followed by the owner's pid, which names no other process where pids are counted together:
containers may share /tmp and not that."""
HEALTH_S = 10.0
"""For one answer to whether it is healthy, for which it generates a token."""
EXIT_S = 2.0
"""From the broken connection of a dying server to the end of one of its processes."""
DYING_S = 20.0
"""From there to the end of the server itself, whose memory a busy machine frees slowly."""
START_ATTEMPTS = 3
"""A free port may be taken by another process before the server binds it. Parts of a server start together or not."""
PORTS = 12_000
"""Just below those that the system hands out: among so many, two servers hardly look at the same one."""


class ServerProcess:
    """A server in a process group of its own, which ends with this process, even when this process is killed."""

    def __init__(self, settings: ServerSettings, meeting: str | None = None):
        """Start it and wait until it is healthy. `meeting`: host:port where its parts find each other.

        Raises: BackendError with the server's own error text when it ends, or is not healthy in time.
        """
        self.settings = settings
        self.url = ""
        self.pid = 0
        _remove_leftovers()
        self._temporary = tempfile.mkdtemp(prefix=f"{TEMPORARY}{os.getpid()}-")
        self._exit_code: int | None = None
        self._ended = threading.Event()
        self._broken = threading.Event()
        self._is_stopped = False
        self._gone: list[str] = []
        """Of the server's own processes, the first that ended while it ran."""
        self._meeting = meeting
        attempts = START_ATTEMPTS if settings.port is None and settings.nodes == 1 else 1
        for attempt in range(1, attempts + 1):
            port = settings.port or free_ports("127.0.0.1")
            self.url = f"http://127.0.0.1:{port}"
            try:
                self._start(port)
                self._wait_until_healthy()
                watched = open_processes(self.pid)  # by this thread: one that ends after the start is told of
                name = f"{settings.name}-processes"
                threading.Thread(target=self._look_after, args=(watched,), name=name, daemon=True).start()
                return
            except BackendError:
                self.stop()
                taken = PORT_TAKEN.search(self._log())
                if not taken or attempt == attempts:
                    raise
            except BaseException:  # an interrupt, or a log file that cannot be opened
                self.stop()
                raise

    def _start(self, port: int) -> None:
        """The process dies with the thread that starts it (PR_SET_PDEATHSIG), so that thread waits for its end."""
        environment = self._environment()
        arguments = [sys.executable, "-m", "megatron_rl.rollout.launch", str(os.getpid())]
        arguments += command(self.settings, port=port, meeting=self._meeting)
        started = threading.Event()
        self._ended.clear()
        self._broken.clear()
        self._is_stopped = False

        log = open(self.settings.log_path, "wb")  # noqa: SIM115 # closed by the thread, which has no one to raise to

        def run() -> None:
            with log:
                try:
                    process = subprocess.Popen(
                        arguments,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                except OSError as error:
                    log.write(f"OSError: {error}\n".encode())  # for `error_text`
                    log.flush()
                    self._exit_code = error.errno
                else:
                    self.pid = process.pid
                    started.set()
                    self._exit_code = process.wait()
            for event in (self._ended, self._broken, started):
                event.set()

        threading.Thread(target=run, name=f"{self.settings.name}-process", daemon=True).start()
        started.wait()

    def _environment(self) -> dict[str, str]:
        settings = self.settings
        Path(self._temporary).mkdir(exist_ok=True)
        path = [str(PLUGIN_SITE), str(Path(__file__).parents[2])]
        own = {"TMPDIR": self._temporary, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        environment = {**os.environ, **own, **without_proxy(os.environ)}
        if settings.device == "cpu":
            environment |= cpu_environment(settings.tp)
            path.append(str(STUBS))
        if "PYTHONPATH" in environment:
            path.append(environment["PYTHONPATH"])
        return environment | {"PYTHONPATH": os.pathsep.join(path)}

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self.settings.start_timeout_s
        http = requests.Session()
        http.trust_env = False
        while time.monotonic() < deadline:
            # Without its port a server does not end, and whoever has the port may answer in its place.
            if self._ended.is_set() or PORT_TAKEN.search(self._log()):
                raise BackendError(f"{self.settings.title} did not start: {self.error_text()}")
            with contextlib.suppress(requests.RequestException):
                if http.get(f"{self.url}/health", timeout=HEALTH_S).status_code == requests.codes.ok:
                    break
            time.sleep(POLL_S)
        else:
            limit = self.settings.start_timeout_s
            raise BackendError(
                f"{self.settings.title} was not healthy within rollout.start_timeout_s={limit:.0f}: "
                f"{self.error_text()} Raise the timeout if it was still loading."
            )
        if NO_PLUGIN.search(self._log()):
            raise BackendError(
                f"{self.settings.name} runs without megatron_rl's plugin, so it takes no weights: {self.error_text()}"
            )

    def _look_after(self, names: dict[int, str]) -> None:
        """End the server after the first of its processes that is gone: for its detokenizer it would wait for ever."""
        self._gone = first_gone(names, self._ended, self.pid)
        for descriptor in names:
            os.close(descriptor)
        self._broken.set()
        if not self._ended.wait(EXIT_S):  # its own account of a scheduler goes before
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def watch(self) -> None:
        """Until it is stopped. Raises: BackendError with the server's own errors when one of its processes ends before.

        The server itself may take seconds more, in which the end of a part on another node would look like the cause.
        """
        self._broken.wait()
        if not self._is_stopped:
            errors = " ".join([self._who_is_gone() or "the server is gone.", *server_errors(self._log())])
            raise BackendError(
                f"{self.settings.title} ended: {errors} Its log is {self.settings.log_path}. Resume with the same "
                "command."
            )

    def _who_is_gone(self) -> str:
        return f"{' and '.join(self._gone)} is gone." if self._gone else ""

    @property
    def log_bytes(self) -> int:
        """How much it has logged, for `error_text`."""
        return Path(self.settings.log_path).stat().st_size

    def _log(self, since: int = 0) -> str:
        path = Path(self.settings.log_path)
        return path.read_bytes()[since:].decode(errors="replace") if path.exists() else ""

    def error_text(self, since: int = 0) -> str:
        """What ended first, what the server itself said went wrong after `since` bytes of its log, and where it is."""
        if self._broken.wait(EXIT_S):
            self._ended.wait(DYING_S)  # connections break before a process has ended
        ended = f"It ended with exit code {self._exit_code}. " if self._ended.is_set() else ""
        said = " ".join(filter(None, [self._who_is_gone(), server_error(self._log(since))]))
        return f"{said}\n{ended}Its log is {self.settings.log_path}."

    def stop(self) -> None:
        """End the server and every process of its group.

        Killed, not asked: SGLang's own way out kills Python's resource tracker too, which then leaves shared memory
        behind. Its children follow the first process, and the tracker, the last, frees what they had.
        """
        self._is_stopped = True
        if self.pid:
            with contextlib.suppress(ProcessLookupError):  # it may end by itself just now
                if not self._ended.is_set():
                    os.kill(self.pid, signal.SIGKILL)
            self._ended.wait()
            end_group(self.pid)
        shutil.rmtree(self._temporary, ignore_errors=True)


def _remove_leftovers() -> None:
    """Temporary directories of owners that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        owner = path.name.removeprefix(TEMPORARY).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(path, ignore_errors=True)


def free_ports(host: str, *, count: int = 1) -> int:
    """The first of `count` ports in a row on which nobody listens at `host`."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        # Of the system's own, any connection may get one while the server still starts.
        first = random.SystemRandom().randrange(max(end - PORTS, 1024), max(end, 1024 + PORTS)) - count
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind((host, port))
            return first
