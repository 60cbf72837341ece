"""Starts the real program as a user does, ends it as the world does, and looks at what it leaves behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
MARK = "MEGATRON_RL_TEST_MARK"
"""Environment variable that every process of one run inherits."""
DEADLINE_S = 900.0
"""For anything that should happen; a machine busy with other things takes long to start a server."""
GONE_S = 60.0
"""For the last process to end after the run's own."""
DONE, FAILED, REFUSED, STOPPED, INTERRUPTED = 0, 1, 2, 85, 130


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that is over."""

    code: int
    text: str
    """Standard output and standard error."""
    cpu_s: float
    """Processor time of the program itself and of the children it waited for."""
    left_behind: tuple[str, ...]
    """Processes of the run that still live, which should be none."""

    def said(self, pattern: str, *, code: int) -> None:
        """Assert that it ended with `code`, one message that matches `pattern`, no traceback and no process left."""
        assert self.code == code, (self.code, self.text)
        message = self.text[max(self.text.rfind("\nrefused: "), self.text.rfind("\nfailed: "), 0) :]
        assert re.search(pattern, message), f"{pattern!r} does not match:\n{self.text}"
        assert "Traceback (most recent call last)" not in self.text, self.text
        assert self.left_behind == (), self.left_behind


class Run:
    """One process of the program, and all that it starts."""

    def __init__(self, arguments: Sequence[str], output: Path):
        self._mark, self._output = uuid.uuid4().hex, output
        self._cpu_s = 0.0
        self._seen: set[psutil.Process] = set()
        self._looked_at: set[int] = set()
        """Pids; one that is used again belongs to a descendant, or to nobody of this run."""
        environment = {**os.environ, MARK: self._mark, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=_in_the_foreground,
            )

    def text(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(errors="replace")

    def wait_until(self, happened: Callable[[], object], *, what: str) -> None:
        """Until `happened()`; fails when the run ends before, or the deadline passes."""
        deadline, look = time.monotonic() + DEADLINE_S, 0.0
        while not happened():
            if time.monotonic() > look:  # a process that has set its title has lost its mark
                self.processes()
                look = time.monotonic() + 0.5
            assert not self.over(), f"the run ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}\n{self.text()}"
            time.sleep(0.005)

    def wait_for(self, text: str) -> None:
        """Until it has printed `text`."""
        self.wait_until(lambda: text in self.text(), what=f"it printed {text!r}")

    def processes(self) -> list[psutil.Process]:
        """The run's living processes: by its mark, by descent, and those seen before that have lost their parent."""
        new = set(psutil.pids()) - self._looked_at - {os.getpid()}
        self._looked_at |= new  # a look at each takes long where the kill of a run must not come late
        found = {p for pid in new if (p := self._marked(pid))}
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.process.pid)
            found |= {driver, *driver.children(recursive=True)}
        self._seen |= found
        return [p for p in self._seen if p.is_running() and not _is_zombie(p)]

    def _marked(self, pid: int) -> psutil.Process | None:
        try:
            process = psutil.Process(pid)
            return process if process.environ().get(MARK) == self._mark else None
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            return None

    def find(self, part: str) -> psutil.Process:
        """The living process with `part` in its title or command line; of several the oldest, which started them."""
        for process in sorted(self.processes(), key=lambda p: p.create_time()):
            if any(part in line for line in describe([process])):
                return process
        raise AssertionError(f"no process {part!r} among {describe(list(self._seen))}")

    def kill(self, part: str) -> None:
        """SIGKILL the process whose title holds `part`."""
        self.find(part).send_signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the program; SIGINT to its whole group, as a terminal does."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def over(self) -> bool:
        """Whether it has ended; the look that finds it so keeps its exit code and what it used."""
        if self.process.returncode is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self._cpu_s = usage.ru_utime + usage.ru_stime
        return self.process.returncode is not None

    def end(self) -> Ended:
        """Wait until it is over, and until its last process is gone or `GONE_S` passed; what is left then is killed."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.over():
            self.processes()
            if time.monotonic() > deadline:
                text = self.text()
                self.abandon()
                raise AssertionError(f"still running after {DEADLINE_S:.0f} s:\n{text}")
            time.sleep(0.1)
        deadline = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        names = describe(left)
        self.abandon()
        return Ended(self.process.returncode, self.text(), self._cpu_s, names)

    def abandon(self) -> None:
        """Kill whatever lives."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _in_the_foreground() -> None:
    """What a shell starts in the background, these tests for example, ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def running(arguments: Sequence[str], output: Path) -> Iterator[Run]:
    """A run, of which nothing lives afterwards."""
    run = Run(arguments, output)
    try:
        yield run
    finally:
        run.abandon()


def finish(arguments: Sequence[str], output: Path) -> Ended:
    """Run to the end."""
    with running(arguments, output) as run:
        return run.end()


def describe(processes: Sequence[psutil.Process]) -> tuple[str, ...]:
    """Pids and command lines."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(f"{process.pid} {' '.join(process.cmdline())[:120] or process.name()}")
    return tuple(lines)


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
