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
HELD = """
import os, signal, sys
from megatron_rl.main import main

class Held:
    def __init__(self, stream, text):
        self.stream, self.text = stream, text

    def write(self, text):
        self.stream.write(text)
        self.stream.flush()
        if self.text in text:
            os.kill(os.getpid(), signal.SIGSTOP)

    def __getattr__(self, name):
        return getattr(self.stream, name)

sys.stdout = Held(sys.stdout, sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""
"""The program, which stops itself whenever it has printed a text: what a test does then comes at that moment."""


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

    def __init__(self, arguments: Sequence[str], output: Path, hold_at: str = ""):
        self._mark, self._output = uuid.uuid4().hex, output
        self._cpu_s = 0.0
        self._seen: set[psutil.Process] = set()
        self._looked_at: set[int] = set()
        """Pids; one that is used again belongs to a descendant, or to nobody of this run."""
        program = ["-c", HELD, hold_at] if hold_at else ["-m", "megatron_rl.main"]
        environment = {**os.environ, MARK: self._mark, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *program, *arguments],
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

    def wait_until_held(self) -> None:
        """Until the program has stopped itself, at the text that it was started with."""
        self.wait_until(lambda: _status(psutil.Process(self.process.pid)) == psutil.STATUS_STOPPED, what="it held")

    def release(self) -> None:
        """Let it go on; signals that it was sent meanwhile come first."""
        self.process.send_signal(signal.SIGCONT)

    def processes(self) -> list[psutil.Process]:
        """The run's living processes: by its mark, by descent, and those seen before that have lost their parent."""
        new = set(psutil.pids()) - self._looked_at - {os.getpid()}
        self._looked_at |= new  # a look at each takes long where the kill of a run must not come late
        found = {p for pid in new if (p := self._marked(pid))}
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.process.pid)
            found |= {driver, *driver.children(recursive=True)}
        self._seen |= found
        return [p for p in self._seen if p.is_running() and _status(p) != psutil.STATUS_ZOMBIE]

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
def running(arguments: Sequence[str], output: Path, *, hold_at: str = "") -> Iterator[Run]:
    """A run, of which nothing lives afterwards. It stops itself when it has printed `hold_at`, until `release`."""
    run = Run(arguments, output, hold_at)
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


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE
