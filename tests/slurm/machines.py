"""Machines made of this one: each has processes, a network, a host name and shared memory of its own, and its files.

They lie below one, `login`, whose network joins them. Nothing of the real machine's is touched, and everything ends
with the first process of `login`, which ends with the tests, however they end.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
LOGIN = "login"
NETWORK = "10.77.0"
START_S = 60.0
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "shellcheck": "shellcheck",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
"""What the tests run, and Debian's name of what has it."""
_BOOT = Path(__file__).parent / "machine.sh"
_SPACES = ("--net", "--mount", "--pid", "--uts", "--ipc")
_UNSHARE = ("unshare", *_SPACES, "--fork", "--kill-child", "--mount-proc")
_PR_SET_PDEATHSIG = 1


def refusal() -> str | None:
    """Why this machine cannot be several, and the mend."""
    if os.geteuid() != 0:
        return "The tests of Slurm make machines of this one, which takes root. Run make slurm-test as root."
    if lacking := {program: package for program, package in PACKAGES.items() if shutil.which(program) is None}:
        return (
            f"The tests of Slurm need {', '.join(lacking)}. apt-get install {' '.join(sorted(set(lacking.values())))}"
        )
    return None


class Machines:
    """`login` and others, which reach each other as 10.77.0.N and by name."""

    def __init__(self, names: Sequence[str], directory: Path) -> None:
        """directory: for files about them. Nothing runs yet."""
        self.addresses = {name: f"{NETWORK}.{i}" for i, name in enumerate(names, 1)}
        self._directory = directory
        self._first: dict[str, psutil.Process] = {}
        """Process 1 of each."""
        for own in (LOGIN, *names):
            # As Debian has it: a machine's own name is a loopback address there, which is no use to any other.
            others = [f"{address} {name}\n" for name, address in self.addresses.items() if name != own]
            (directory / f"hosts.{own}").write_text(f"127.0.0.1 localhost\n127.0.1.1 {own}\n{''.join(others)}")
        (directory / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        (directory / "local").mkdir()

    def start(self, name: str) -> None:
        """Switch one on; `login` comes first. machine.sh is what it does then."""
        address = self.addresses.get(name, f"{NETWORK}.254")
        below = [] if name == LOGIN else ["nsenter", f"--target={self._first[LOGIN].pid}", *_SPACES]
        with (self._directory / f"{name}.boot").open("wb") as log:
            process = subprocess.Popen(
                [*below, *_UNSHARE, _BOOT, self._directory, name, address],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
                preexec_fn=_die_with_the_tests,
            )
        self._first[name] = first = wait_for(lambda: _first_process(process.pid), what=f"{name} is there")
        if name != LOGIN:
            peer = ["type", "veth", "peer", "name", "eth0", "netns", str(first.pid)]
            self._network("add", f"to-{name}", *peer)
            self._network("set", f"to-{name}", "master", "nodes", "up")

    def cut(self, name: str) -> None:
        """Nothing reaches the machine any more, and nobody is told."""
        self._network("set", f"to-{name}", "down")

    def _network(self, *words: str) -> None:
        # In login's network, and with the process numbers that are seen from here.
        command = ["nsenter", f"--target={self._first[LOGIN].pid}", "--net", "ip", "link", *words]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def is_on(self, name: str) -> bool:
        """Whether it runs."""
        return name in self._first and _lives(self._first[name])

    def off(self, name: str) -> None:
        """Switch it off, with everything on it: who loses process 1 is killed by the kernel."""
        if self.is_on(name):
            self._first[name].kill()
        wait_for(lambda: not self.is_on(name), what=f"{name} is off")
        if name != LOGIN and self.is_on(LOGIN):  # the kernel takes its time
            with contextlib.suppress(subprocess.CalledProcessError):  # it has taken it
                self._network("delete", f"to-{name}")

    def stop(self) -> None:
        """Switch all off."""
        for name in reversed(self._first):
            self.off(name)

    def run(self, *command: object, cwd: Path = ROOT, more: dict[str, str] | None = None) -> str:
        """What a command prints on `login`, with `more` in its environment."""
        done = subprocess.run(
            ["nsenter", f"--target={self._first[LOGIN].pid}", *_SPACES, "env", "-C", str(cwd), *map(str, command)],
            env=environment() | {"TMPDIR": str(self._directory / "local")} | (more or {}),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, (command, done.returncode, done.stdout, done.stderr)
        return done.stdout.strip()

    def daemon(self, name: str, title: str) -> psutil.Process:
        """What machine.sh has started there under this name."""
        return next(child for child in self._first[name].children() if child.name() == title)

    def processes(self, name: str) -> list[psutil.Process]:
        """Those on a machine, without what machine.sh has started."""
        found: list[psutil.Process] = []
        if not self.is_on(name):
            return found
        namespace = os.readlink(f"/proc/{self._first[name].pid}/ns/pid")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                is_later = process.name() != "slurmd" and process != self._first[name]
                if is_later and os.readlink(f"/proc/{process.pid}/ns/pid") == namespace and _lives(process):
                    found.append(process)
        return found

    def titles(self, name: str) -> list[str]:
        """Names and command lines of a machine's processes."""
        found = []
        for process in self.processes(name):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
                found.append(" ".join([process.name(), *process.cmdline()]))
        return found

    def process(self, name: str, title: str) -> psutil.Process:
        """The one process on a machine whose name begins with `title`."""
        found = [p for p in self.processes(name) if p.name().startswith(title)]
        assert len(found) == 1, (title, found, self.processes(name))
        return found[0]


def environment() -> dict[str, str]:
    """This process's, without what would tell Slurm, Ray or the job script something else."""
    foreign = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SINFO", "SCANCEL", "MUNGE", "MRL_", "RAY_", "PYTEST_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def wait_for[T](happened: Callable[[], T | None], *, what: str, timeout_s: float = START_S) -> T:
    """The first true value of `happened()`."""
    deadline = time.monotonic() + timeout_s
    while not (value := happened()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.1)
    return value


def _first_process(ancestor: int) -> psutil.Process | None:
    """The process below `ancestor` that is the first of its namespace."""
    for process in psutil.Process(ancestor).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            numbers = re.search(r"^NSpid:(.*)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
            if numbers and numbers[1].split()[-1] == "1":
                return process
    return None


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _die_with_the_tests() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(refusal())
