"""What slurm_grpo.sh asks of the nodes of its job, each as a job step:

job_steps.py plan COUNT ARGUMENT ...       on the first of COUNT nodes: the run directory, and where Ray will listen
job_steps.py start HEAD IP PORT LOGS ROLE  on every node: hold a Ray node until a signal, or until it breaks
job_steps.py wait IP PORT NODE ...         until Ray has exactly these, with a deadline; prints where each is reached
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

REFUSED, LOST = 2, 75
"""Exit codes: the config or the environment is wrong; a node did not come, or was lost."""
try:
    from launch.addresses import (
        ANSWER_S,
        POLL_S,
        PORTS,
        PORTS_A_JOB,
        free_port,
        node_name,
        own_address,
        wait_for_port,
    )
    from megatron_rl.arrangement import OBJECT_STORE_BYTES, cpus_needed
    from megatron_rl.errors import BackendError, ConfigError, DataError, LayoutError
except ModuleNotFoundError as error:
    print(
        f"\nrefused: {sys.executable} of {socket.gethostname()} has no {error.name}. Make the clone's environment with "
        "`make env`, or name another interpreter with MRL_PYTHON, or an image (docs/cluster.md).",
        file=sys.stderr,
    )
    sys.exit(REFUSED)
TEMPORARY = "mrl-ray-"
LONGEST_PARENT = 26
"""Bytes: of a socket's path, of which there may be 107, the rest is TEMPORARY's, a session's, and the socket's name."""
SHARED_S = 20.0
"""For a directory to be seen on another node."""
KEPT_LOGS = {
    "raylet.out": r" [EFC] \d",
    "raylet.err": r"^(?!.*\(\+0x)",
    "gcs_server.out": r" [EFC] \d",
    "ray_process_exit.log": "",
}
"""Of Ray's own logs, and what their lines must be to be worth it: of statistics and addresses there are many."""


def plan(count: str, *arguments: str) -> int:
    """Print run directory, address and port, each on a line, or say why this command line is refused."""
    from megatron_rl.main import read_config
    from megatron_rl.run_directory import RunDirectory

    config = read_config([*arguments, "cluster.address=auto"])  # which is not known yet, and is not null
    if config.cluster.nodes not in (None, int(count)):
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}, and the job has {count}: the layout was made for the former. "
            f"Submit with sbatch --nodes={config.cluster.nodes}, or set cluster.nodes={count}."
        )
    gpus, each = int(os.environ.get("SLURM_GPUS_ON_NODE", "0")), config.cluster.gpus_per_node
    if config.cluster.nodes is not None and gpus < each:
        raise ConfigError(
            f"cluster.gpus_per_node={each}, and the job has {gpus} on {node_name()}: the run would wait for others, "
            f"or compute on CPUs. Submit with sbatch --gpus-per-node={each}."
        )
    have, need = cpus_of_job(os.environ), cpus_needed(config)
    if have < need:
        raise ConfigError(
            f"The job has {have} CPUs, and the run needs {need}: one for each trainer rank, each engine rank, and the "
            f"reward. Submit with sbatch --cpus-per-task={-(-need // int(count))}, or on more nodes."
        )
    run = RunDirectory(config)
    run.lock().close()  # is it to be had? The program will need it, when all nodes have been waited for
    address, _ = own_address()
    # Of this step, as runs may share a job too.
    first = int(os.environ["SLURM_JOB_ID"]) * PORTS_A_JOB + int(os.environ["SLURM_STEP_ID"]) % PORTS_A_JOB
    print(run.path, address, free_port(address, first=first), sep="\n")
    return 0


def cpus_of_job(environment: Mapping[str, str]) -> int:
    """Of all its nodes, and of all its components: Slurm writes "4(x2),3" for 11."""
    groups = range(int(environment.get("SLURM_HET_SIZE", "0")))
    names = [f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{i}" for i in groups] or ["SLURM_JOB_CPUS_PER_NODE"]
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", ",".join(environment[name] for name in names))
    return sum(int(cpus) * int(times or 1) for cpus, times in found)


def start(head: str, address: str, port: str, logs: str, role: str) -> int:
    """Hold a Ray node, with exactly the CPUs and GPUs that the job has on this machine. Returns: how it ended."""
    own, interface = own_address(towards=address)
    cpus, gpus = os.environ["SLURM_CPUS_ON_NODE"], os.environ.get("SLURM_GPUS_ON_NODE", "0")
    parent = temporary_parent()
    what = f"{own} on {interface}, {cpus} CPUs, {gpus} GPUs, role {role or 'any'}; Ray's files in {parent}"
    print(f"{node_name()}: {what}", flush=True)
    wait_for_directory(Path(logs))
    check_home(os.path.expanduser("~"))
    remove_leftovers(parent)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
    lock = os.open(temporary, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # until this process is gone, however it goes
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={own}"]
    command += [f"--node-name={node_name()}", f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--temp-dir={temporary}"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--resources={json.dumps({role: 1} if role else {})}"]
    # Free ones, which Ray tells its peers: with its fixed defaults a second job here would meet the first one's.
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    command += ["--include-log-monitor=false", "--disable-usage-stats"]
    if node_name() == head:
        client_port = free_port(own, first=int(port) + PORTS // 2)  # of a server that cannot be turned off
        command += ["--head", f"--port={port}", f"--ray-client-server-port={client_port}"]
        command += ["--include-dashboard=false", "--no-monitor"]  # of the autoscaler: the job's nodes are what there is
    else:
        wait_for_port(address, int(port))
        command += [f"--address={address}:{port}"]
    asked = []  # to end; Slurm has asked Ray's processes too
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    code = subprocess.run(command, check=False).returncode
    if not asked:
        print(f"{node_name()}: Ray ended by itself, with code {code}", flush=True)
        keep_logs(temporary)
    shutil.rmtree(temporary, ignore_errors=True)
    return 0 if asked else LOST


def temporary_parent() -> Path:
    """The temporary directory, or /tmp where the name of that leaves Ray's sockets no room."""
    own = tempfile.gettempdir()
    return Path(own if len(os.fsencode(own)) <= LONGEST_PARENT else "/tmp")


def wait_for_directory(path: Path) -> None:
    """Until it is here, which the first node has made. Raises: ConfigError."""
    deadline = time.monotonic() + SHARED_S
    while not path.is_dir():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{node_name()} does not see {path}, which the job's first node has made: all ranks write there. "
                "Choose a runs_dir on a file system that all nodes have; for containers name it in MRL_MOUNTS too."
            )
        time.sleep(POLL_S)


def check_home(home: str) -> None:
    """Raises: ConfigError where it cannot be written."""
    if not os.access(home, os.W_OK):
        raise ConfigError(
            f"The home {home} cannot be written on {node_name()}: torch and SGLang do not start without the caches "
            "that they make there. Name a directory that can: HOME=/tmp sbatch ..."
        )


def remove_leftovers(parent: Path) -> None:
    """Temporary directories of nodes that were killed."""
    for path in parent.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def keep_logs(temporary: Path) -> None:
    """Print what Ray's own logs say of its end: they lie on this machine and are about to go."""
    for name, pattern in KEPT_LOGS.items():
        for path in temporary.glob(f"session_2*/logs/{name}"):
            lines = [line for line in path.read_text(errors="replace").splitlines() if re.search(pattern, line)]
            print(*(f"{name}: {line}" for line in lines[-20:]), sep="\n", flush=True)


def wait(address: str, port: str, *names: str) -> int:
    """Until Ray has these nodes and no others; prints name, address and port of each."""
    limit_s = float(os.environ.get("MRL_READY_S") or "180")
    deadline = time.monotonic() + limit_s
    found: dict[str, str] = {}
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((address, int(port)), timeout=ANSWER_S).close()
            found = alive_nodes(f"{address}:{port}")
            if found.keys() == set(names):
                print(*found.values(), sep="\n")
                return 0
        time.sleep(POLL_S)
    missing = [name for name in names if name not in found]
    strange = sorted(found.keys() - set(names))
    what = f"{', '.join(missing)} did not come" if missing else f"{', '.join(strange)} came too, unasked"
    print(
        f"{len(names) - len(missing)} of {len(names)} nodes were ready within MRL_READY_S={limit_s:.0f}: {what}. See "
        f"{', '.join(f'ray-{name}.log' for name in missing) or 'the logs'}; raise MRL_READY_S if it was only slow.",
        file=sys.stderr,
    )
    return LOST


def alive_nodes(address: str) -> dict[str, str]:
    """Name -> "name address port" of the nodes that live. Raises: OSError when Ray's head gives no answer."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined] # compiled
    from ray.exceptions import RpcError

    try:
        infos = GcsClient(address=address).get_all_node_info(timeout=ANSWER_S).values()
    except RpcError as error:
        raise OSError(str(error)) from error
    return {
        info.node_name: f"{info.node_name} {info.node_manager_address} {info.node_manager_port}"
        for info in infos
        if info.state == info.ALIVE
    }


COMMANDS: dict[str, Callable[..., int]] = {"plan": plan, "start": start, "wait": wait}


def main(command: str, *arguments: str) -> int:
    """Run one of the commands. Returns: the exit code."""
    # `scancel --signal=USR1 JOB` reaches every step, Ray's too, which inherit this. It is the program's to stop.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        return COMMANDS[command](*arguments)
    except (ConfigError, DataError, LayoutError) as error:
        print(f"\nrefused: {error}", file=sys.stderr)
        return REFUSED
    except BackendError as error:
        print(f"\nfailed: {error}", file=sys.stderr)
        return LOST


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
