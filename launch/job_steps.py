"""What slurm_grpo.sh asks of the nodes of its job, each as a job step:

job_steps.py plan COUNT ARGUMENT ...   on the first of COUNT nodes: the run directory, and where Ray's head will listen
job_steps.py start HEAD IP PORT ROLE   on every node: hold a Ray node until a signal, or until it breaks
job_steps.py wait IP PORT NODE ...     until Ray has exactly these, with a deadline; prints where each is reached
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
from collections.abc import Callable
from pathlib import Path

import psutil

from megatron_rl.arrangement import OBJECT_STORE_BYTES
from megatron_rl.errors import BackendError, ConfigError, DataError, LayoutError

REFUSED, LOST = 2, 75
"""Exit codes: the config or the environment is wrong; a node did not come, or was lost."""
POLL_S = 0.2
ANSWER_S = 3.0
"""For one answer of a node."""
FIRST_PORT, PORTS, PORTS_A_JOB = 20_000, 10_000, 10
"""Below the ports that a kernel gives out by itself. Jobs that start together on a node look at different ones."""
TEMPORARY = "mrl-ray-"
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
    run = RunDirectory(config)
    run.logs.mkdir(parents=True, exist_ok=True)
    address, _ = own_address()
    print(run.path, address, free_port(address, first=int(os.environ["SLURM_JOB_ID"]) * PORTS_A_JOB), sep="\n")
    return 0


def own_address(*, towards: str | None = None) -> tuple[str, str]:
    """(IPv4 address, interface) by which other machines reach this one.

    That of MRL_INTERFACE; else of the interface that leads to `towards`, or to anywhere. Never a loopback address,
    which a machine's own name often stands for in its /etc/hosts.
    """
    every = {
        interface: one.address
        for interface, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    }
    listed = ", ".join(f"{interface} ({address})" for interface, address in every.items()) or "none"
    wanted = os.environ.get("MRL_INTERFACE")
    if wanted:
        if wanted not in every:
            raise ConfigError(
                f"MRL_INTERFACE={wanted} is no interface of {_name()} with an IPv4 address. Set it to one of: {listed}."
            )
        return every[wanted], wanted
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        with contextlib.suppress(OSError):
            probe.connect((towards or "192.0.2.1", 9))
        leading = probe.getsockname()[0]
    chosen = [interface for interface, address in every.items() if address == leading or len(every) == 1]
    if not chosen:
        raise ConfigError(
            f"{_name()} has no interface that clearly leads to other machines, of these: {listed}. Name one with "
            "MRL_INTERFACE=..."
        )
    return every[chosen[0]], chosen[0]


def free_port(address: str, *, first: int) -> int:
    """A port that nobody listens on, the same for a job as long as it is free, and another for another job."""
    for i in range(PORTS):
        port = FIRST_PORT + (first + i) % PORTS
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind((address, port))
            return port
    raise BackendError(f"No port of {address} from {FIRST_PORT} on is free for Ray. Choose another first node.")


def start(head: str, address: str, port: str, role: str) -> int:
    """Hold a Ray node, with exactly the CPUs and GPUs that the job has on this machine. Returns: how it ended."""
    own, interface = own_address(towards=address)
    cpus, gpus = os.environ["SLURM_CPUS_ON_NODE"], os.environ.get("SLURM_GPUS_ON_NODE", "0")
    print(f"{_name()}: {own} on {interface}, {cpus} CPUs, {gpus} GPUs {role}", flush=True)
    remove_leftovers()
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    lock = os.open(temporary, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # until this process is gone, however it goes
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={own}"]
    command += [f"--node-name={_name()}", f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--temp-dir={temporary}"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--resources={json.dumps({role: 1} if role else {})}"]
    # Free ones, which Ray tells its peers: with its fixed defaults a second job here would meet the first one's.
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    command += ["--include-log-monitor=false", "--disable-usage-stats"]
    if _name() == head:
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
        print(f"{_name()}: Ray ended by itself, with code {code}", flush=True)
        keep_logs(temporary)
    shutil.rmtree(temporary, ignore_errors=True)
    return 0 if asked else LOST


def remove_leftovers() -> None:
    """Temporary directories of nodes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
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


def wait_for_port(address: str, port: int) -> None:
    """Until someone listens there; whoever started this knows how long that may take."""
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=ANSWER_S).close()
            return
        time.sleep(POLL_S)


def wait(address: str, port: str, *names: str) -> int:
    """Until Ray has these nodes and no others; prints name, address and port of each."""
    limit_s = float(os.environ.get("MRL_READY_S", "180"))
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


def _name() -> str:
    return os.environ["SLURMD_NODENAME"]


COMMANDS: dict[str, Callable[..., int]] = {"plan": plan, "start": start, "wait": wait}


def main(command: str, *arguments: str) -> int:
    """Run one of the commands. Returns: the exit code."""
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
