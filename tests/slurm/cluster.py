"""A real Slurm on this machine: a controller and nodes, each with processes, network and shared memory of its own.

All of it lives below one process that has namespaces of its own: nothing of the machine's is touched, and processes,
mounts, bridge and addresses end when that process ends, which it does with the tests.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "slurm_grpo.sh"
NETWORK = "10.77.0"
CPUS, GPUS = 16, 4
"""That each node claims to have."""
START_S = 60.0
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_MACHINE = Path(__file__).parent / "machine.sh"
_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
_PR_SET_PDEATHSIG = 1
_CONFIG = """
ClusterName=tests
SlurmctldHost=controller({network}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdSpoolDir={directory}/spool.%n
StateSaveLocation={directory}/state
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={directory}/log/jobcomp.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
MessageTimeout=10
SlurmdTimeout=30
KillWait=5
MinJobAge=3600
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=10000,bf_interval=1
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=20000
NodeName=DEFAULT Gres=gpu:{gpus} State=UNKNOWN
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """`count` nodes, node1 to nodeN, whose jobs share this machine's file system but not TMPDIR nor /dev/shm."""

    def __init__(self, count: int) -> None:
        self.names = [f"node{i}" for i in range(1, count + 1)]
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: sockets lie below it
        self._machines: dict[str, psutil.Process] = {}
        """The first process of the controller and of each node."""
        self.directory.chmod(0o755)
        self._write_config()

    def start(self) -> None:
        """Start the controller and every node."""
        self._start("controller", f"{NETWORK}.254")
        boot = self.directory / "log" / "controller.boot"
        _wait_for(lambda: "started" in boot.read_text(), what="the controller has its bridge")  # to tie nodes to
        for name in self.names:
            self.start_node(name)

    def _write_config(self) -> None:
        for folder in ("log", "state", "local", "dev"):
            (self.directory / folder).mkdir()
        devices = [self.directory / "dev" / f"gpu{i}" for i in range(GPUS)]
        for device in devices:
            os.mknod(device, 0o20666, os.makedev(1, 3))
        addresses = {name: f"{NETWORK}.{i}" for i, name in enumerate(self.names, 1)}
        features = dict.fromkeys(self.names, "small") | {self.names[-1]: "large"}
        lines = (f"NodeName={name} NodeAddr={address} Feature={features[name]}" for name, address in addresses.items())
        values = {
            "directory": self.directory,
            "network": NETWORK,
            "cpus": CPUS,
            "gpus": GPUS,
            "nodes": "\n".join(lines),
        }
        (self.directory / "slurm.conf").write_text(_CONFIG.format(**values))
        (self.directory / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
        (self.directory / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        for own in ("controller", *self.names):
            # As Debian has it: a machine's own name is a loopback address there, which is no use to any other.
            others = [f"{address} {name}\n" for name, address in addresses.items() if name != own]
            (self.directory / f"hosts.{own}").write_text(f"127.0.0.1 localhost\n127.0.1.1 {own}\n{''.join(others)}")

    def _start(self, name: str, address: str, *, below: Sequence[str] = ()) -> None:
        with (self.directory / "log" / f"{name}.boot").open("wb") as log:
            process = subprocess.Popen(
                [*below, *_UNSHARE, _MACHINE, self.directory, name, address],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_the_tests,
            )
        self._machines[name] = first = _wait_for(lambda: _first_process(process.pid), what=f"{name} is there")
        if name != "controller":
            link = ["ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(first.pid)]
            # In the controller's network, and with the process numbers that are seen from here.
            network = ["nsenter", "-t", str(self._machines["controller"].pid), "--net"]
            subprocess.run([*network, *link], check=True)
            self.run("ip", "link", "set", f"to-{name}", "master", "nodes", "up")

    def start_node(self, name: str) -> None:
        """Start a node that is off, and wait until Slurm would give it work."""
        if name in self._machines and self._machines[name].is_running():
            return
        address = f"{NETWORK}.{self.names.index(name) + 1}"
        self._start(name, address, below=self._inside())
        state = ("sinfo", "--noheader", "--nodes", name, "--partition", "batch", "--format", "%t")
        _wait_for(lambda: self.run(*state) == "idle", what=f"{name} idles")

    def stop(self) -> None:
        """End everything: who loses the first process of its namespace is killed by the kernel."""
        for first in self._machines.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                first.kill()
        _wait_for(lambda: not any(map(_lives, self._machines.values())), what="all nodes are off")
        shutil.rmtree(self.directory)

    def processes(self, name: str) -> list[psutil.Process]:
        """Those on a node, without what ran before any job."""
        found: list[psutil.Process] = []
        if not _lives(self._machines[name]):
            return found
        namespace = os.readlink(f"/proc/{self._machines[name].pid}/ns/pid")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                is_job = process.name() != "slurmd" and process != self._machines[name]
                if is_job and os.readlink(f"/proc/{process.pid}/ns/pid") == namespace and _lives(process):
                    found.append(process)
        return found

    def titles(self, name: str) -> list[str]:
        """Names and command lines of a node's processes."""
        found = []
        for process in self.processes(name):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
                found.append(" ".join([process.name(), *process.cmdline()]))
        return found

    def process(self, name: str, title: str) -> psutil.Process:
        """The one process on a node that is called `title`."""
        found = [p for p in self.processes(name) if p.name() == title]
        assert len(found) == 1, (title, found, self.processes(name))
        return found[0]

    def slurmd(self, name: str) -> psutil.Process:
        """The node's daemon."""
        return next(child for child in self._machines[name].children() if child.name() == "slurmd")

    def _inside(self) -> list[str]:
        return ["nsenter", "-t", str(self._machines["controller"].pid), "--net", "--mount", "--pid", "--uts", "--ipc"]

    def run(self, *command: object, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> str:
        """What a command prints that is run where users of this Slurm log in."""
        own = {"SLURM_CONF": str(self.directory / "slurm.conf"), "TMPDIR": str(self.directory / "local")}
        done = subprocess.run(
            [*self._inside(), "env", "-C", str(cwd), *map(str, command)],
            env={**os.environ, **own, **(environment or {})},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, (command, done.returncode, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(
        self,
        *arguments: object,
        options: Sequence[object] = (),
        script: Path = SCRIPT,
        cwd: Path = ROOT,
        environment: dict[str, str] | None = None,
    ) -> "Job":
        """`sbatch OPTIONS launch/slurm_grpo.sh ARGUMENTS`."""
        number = self.run("sbatch", "--parsable", *options, script, *arguments, cwd=cwd, environment=environment)
        return Job(self, int(number))


@dataclass(frozen=True, slots=True)
class Job:
    """One job, by what Slurm says of it."""

    cluster: Cluster
    number: int

    def fields(self) -> dict[str, str]:
        """As `scontrol show job` has them."""
        shown = self.cluster.run("scontrol", "show", "job", "-o", self.number)
        return dict(re.findall(r"(\w+(?:/\w+)?)=(.*?)(?= \w+(?:/\w+)?=|$)", shown))

    def state(self) -> str:
        """JobState and ExitCode: "COMPLETED 0:0"."""
        fields = self.fields()
        return f"{fields['JobState']} {fields['ExitCode']}"

    def is_over(self) -> bool:
        """Whether it will not run again."""
        return self.fields()["JobState"] in ENDS

    def recorded(self) -> str:
        """The same, as Slurm wrote it into its record of ended jobs: a job on a lost node is COMPLETING for long."""
        log = (self.cluster.directory / "log" / "jobcomp.log").read_text()
        found = re.findall(rf"^JobId={self.number} .* JobState=(\w+) .* ExitCode=(\S+)", log, re.MULTILINE)
        return " ".join(found[-1]) if found else ""

    def output(self) -> str:
        """What it has printed."""
        path = Path(self.fields()["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for[T](self, happened: Callable[[], T | None], *, what: str, timeout_s: float = 120.0) -> T:
        """The first true value of `happened()`; a failure shows what the job has printed."""
        try:
            return _wait_for(happened, what=what, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.state()}\n{self.output()}") from error

    def wait_for_text(self, text: str, *, timeout_s: float = 120.0) -> None:
        """Until it has printed `text`; not longer than it runs."""
        self.wait_for(
            lambda: text in self.output() or self.fields()["JobState"] in ENDS, what=text, timeout_s=timeout_s
        )
        assert text in self.output(), f"it ended before it printed {text!r}: {self.state()}\n{self.output()}"

    def end(self, *, timeout_s: float = 120.0) -> str:
        """Wait until it is over. Returns: as `state`."""
        self.wait_for(self.is_over, what="it is over", timeout_s=timeout_s)
        return self.state()


def _wait_for[T](happened: Callable[[], T | None], *, what: str, timeout_s: float = START_S) -> T:
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


@contextlib.contextmanager
def running(count: int) -> Iterator[Cluster]:
    """A cluster, of which nothing is left afterwards."""
    cluster = Cluster(count)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
