"""A real Slurm on machines made of this one, and its jobs."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.slurm.machines import LOGIN, NETWORK, ROOT, Machines, environment, wait_for

SCRIPT = ROOT / "launch" / "slurm_grpo.sh"
SMALL = {"MRL_PYTHON": str(Path(__file__).parent / "driver.sh")}
"""Environment of jobs that run the small driver in place of the program."""
CPUS, GPUS = 16, 4
"""That each node claims to have."""
DEADLINE_S = 300.0
"""For anything that should happen; a machine busy with other things takes long to start Ray."""
LEFT_S = 15.0
"""For the last process of a job after its end."""
LOST_S = 30.0
"""From the loss of a node to the end of its job."""
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_CONFIG = """
ClusterName=tests
SlurmctldHost=login({network}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=60
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


class Slurm:
    """`count` nodes, node1 to nodeN, whose jobs share this machine's file system but not TMPDIR nor /dev/shm.

    The first has the feature "small", the others "large".
    """

    def __init__(self, count: int) -> None:
        self.names = [f"node{i}" for i in range(1, count + 1)]
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: sockets lie below it
        self.directory.chmod(0o755)
        self.machines = Machines(self.names, self.directory)
        for folder in ("log", "state", "dev"):
            (self.directory / folder).mkdir()
        devices = [self.directory / "dev" / f"gpu{i}" for i in range(GPUS)]
        for device in devices:
            os.mknod(device, 0o20666, os.makedev(1, 3))
        lines = [
            f"NodeName={name} NodeAddr={address} Feature={'small' if name == self.names[0] else 'large'}"
            for name, address in self.machines.addresses.items()
        ]
        values = {"directory": self.directory, "network": NETWORK, "cpus": CPUS, "gpus": GPUS}
        (self.directory / "slurm.conf").write_text(_CONFIG.format(nodes="\n".join(lines), **values))
        (self.directory / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))

    def start(self) -> None:
        """Start the controller and every node."""
        self.machines.start(LOGIN)
        boot = self.directory / f"{LOGIN}.boot"
        wait_for(lambda: "started" in boot.read_text(), what="there is a bridge")  # to tie nodes to
        for name in self.names:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        """Start a node that is off, and wait until Slurm would give it work."""
        if self.machines.is_on(name):
            return
        self.machines.start(name)
        state = ("sinfo", "--noheader", "--nodes", name, "--partition", "batch", "--format", "%t")
        wait_for(lambda: self.run(*state) == "idle", what=f"{name} idles")

    def stop(self) -> None:
        """End everything."""
        self.machines.stop()
        shutil.rmtree(self.directory)

    def slurmd(self, name: str) -> psutil.Process:
        """The node's daemon, without which it switches itself off."""
        return self.machines.daemon(name, "slurmd")

    def run(self, *command: object, cwd: Path = ROOT, more: dict[str, str] | None = None) -> str:
        """What a command prints that is run where users of this Slurm log in."""
        conf = {"SLURM_CONF": str(self.directory / "slurm.conf")}
        return self.machines.run(*command, cwd=cwd, more=conf | (more or {}))

    def submit(
        self,
        *arguments: object,
        options: Sequence[object] = (),
        script: Path = SCRIPT,
        cwd: Path = ROOT,
        more: dict[str, str] | None = None,
    ) -> "Job":
        """`sbatch OPTIONS launch/slurm_grpo.sh ARGUMENTS`, with `more` in the environment."""
        number = self.run("sbatch", "--parsable", *options, script, *arguments, cwd=cwd, more=more)
        return Job(self, int(number))


@dataclass(frozen=True, slots=True)
class Job:
    """One job, by what Slurm says of it."""

    slurm: Slurm
    number: int

    def fields(self) -> dict[str, str]:
        """As `scontrol show job` has them."""
        shown = self.slurm.run("scontrol", "show", "job", "-o", self.number)
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
        log = (self.slurm.directory / "log" / "jobcomp.log").read_text()
        found = re.findall(rf"^JobId={self.number} .* JobState=(\w+) .* ExitCode=(\S+)", log, re.MULTILINE)
        return " ".join(found[-1]) if found else ""

    def output(self) -> str:
        """What it has printed."""
        path = Path(self.fields()["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for[T](self, happened: Callable[[], T | None], *, what: str, timeout_s: float = DEADLINE_S) -> T:
        """The first true value of `happened()`; a failure shows what the job has printed."""
        try:
            return wait_for(happened, what=what, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.state()}\n{self.output()}") from error

    def wait_for_text(self, text: str, *, timeout_s: float = DEADLINE_S) -> None:
        """Until it has printed `text`; not longer than it runs."""
        self.wait_for(
            lambda: text in self.output() or self.fields()["JobState"] in ENDS, what=text, timeout_s=timeout_s
        )
        assert text in self.output(), f"it ended before it printed {text!r}: {self.state()}\n{self.output()}"

    def end(self, *, timeout_s: float = DEADLINE_S) -> str:
        """Wait until it is over. Returns: as `state`."""
        self.wait_for(self.is_over, what="it is over", timeout_s=timeout_s)
        return self.state()

    def start_again(self) -> None:
        """A requeued job would wait until its first start's credentials have expired: let it start now."""
        self.wait_for(lambda: self.fields()["JobState"] == "PENDING", what="it is requeued")
        self.wait_for(
            lambda: "comp" not in self.slurm.run("sinfo", "--noheader", "--format=%t"), what="its nodes are free"
        )
        time.sleep(1.1)  # Slurm takes a credential of the second in which others were revoked for one of them
        self.slurm.run("scontrol", "update", f"jobid={self.number}", "starttime=now")
        self.wait_for_text("start 1, on")

    def leaves_nothing(self) -> None:
        """No process of any job is left on a node, soon."""

        def left() -> list[str]:
            return [f"{name}: {title}" for name in self.slurm.names for title in self.slurm.machines.titles(name)]

        self.wait_for(lambda: not left(), what="no process is left", timeout_s=LEFT_S)


@contextlib.contextmanager
def running(count: int) -> Iterator[Slurm]:
    """A Slurm, of which nothing is left afterwards."""
    slurm = Slurm(count)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def run_here(runs: Path, name: str, *arguments: str) -> float:
    """The demo on this machine, without Slurm. Returns: when it was started, in seconds since 1970."""
    begun_s = time.time()
    command = [ROOT / "launch/local.sh", "experiment=cpu_digits", f"name={name}", f"runs_dir={runs}", *arguments]
    done = subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return begun_s
