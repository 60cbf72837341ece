"""Points as processes of this machine, one after another. Each ends with the sweep."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import psutil

from megatron_rl.config import Config
from megatron_rl.errors import BackendError
from megatron_rl.sweeps.points import RUNNING, Point, as_ended, begin

NAME = "local"
PR_SET_PDEATHSIG = 1
_GRACE_S = 120.0
"""For a run to end its processes."""


class Local:
    """Starts points here."""

    name = NAME
    at_once: int | None = 1
    poll_s = 0.5
    added: Sequence[str] = ()

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def check(self, point: Point, config: Config) -> None:
        """Nothing here can refuse a point."""

    def command(self, point: Point, config: Config) -> list[str]:
        """What starts it."""
        return [sys.executable, "-m", "megatron_rl.main", *point.arguments]

    def submit(self, point: Point, config: Config) -> Point:
        """Start its process. Raises: BackendError."""
        point = begin(point, launcher=NAME)
        command = self.command(point, config)
        libc = ctypes.CDLL("libc.so.6", use_errno=True)
        try:
            with point.log.open("ab") as log:
                log.write(f"{shlex.join(command)}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the sweep only, which ends its point once
                    preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
                )
        except OSError as error:
            raise BackendError(f"{point.name} cannot be started ({error}). Its log is {point.log}.") from error
        self._processes.append(process)
        return replace(point, state=RUNNING, job=f"{process.pid}@{psutil.Process(process.pid).create_time()}")

    def look(self, points: Sequence[Point]) -> list[Point]:
        """As `look`, and take note of own processes that have ended."""
        for process in self._processes:
            process.poll()
        return look(points)

    def leave(self, active: Sequence[Point]) -> str:
        """The sweep was interrupted: end what runs, and say so."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return f"{_names(active)} ended too. The same command goes on from the newest checkpoint."


def look(points: Sequence[Point]) -> list[Point]:
    """`points`, active when last looked at, as they are now."""
    return [_look(point) for point in points]


def _look(point: Point) -> Point:
    pid, _, started_s = point.job.partition("@")
    try:
        process = psutil.Process(int(pid))
        if str(process.create_time()) == started_s and process.status() != psutil.STATUS_ZOMBIE:
            return replace(point, seconds=time.time() - float(started_s))
    except (psutil.NoSuchProcess, ValueError):  # ValueError: the sweep was killed before it wrote down which process
        pass
    return as_ended(point)


def _names(points: Iterable[Point]) -> str:
    return ", ".join(point.name for point in points)
