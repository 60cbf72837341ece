"""Machines of a cluster on this one: each has a network, a host name, processes, /tmp/ray and /dev/shm of its own.

They share the file system, as nodes of a cluster do, and lie on one bridge, which has a network of its own too. Needs
root. All of it is held by processes that end with this one, even when this one is killed.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
NETWORK = "10.78.0"
"""On a bridge that nothing else is on, not even this machine."""
_HELD = ("setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child")
PORT = 6379
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # as the program starts its own
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
_BOOT = """
set -e
hostname {name}
mount --bind {hosts} /etc/hosts
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
touch {ready}
sleep infinity &
wait  # and take in those whose parents have ended, as the first process of a machine does
"""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine."""

    name: str
    address: str
    first: psutil.Process
    """Its process 1."""
    switch: psutil.Process
    """Of the network that its cable ends in."""

    def command(self, words: Sequence[object]) -> list[str]:
        """What runs `words` on this machine."""
        place = ["nsenter", f"--target={self.first.pid}", "--net", "--uts", "--ipc", "--mount", "--pid"]
        return [*place, f"--wdns={ROOT}", "--", *map(str, words)]

    def start(self, words: Sequence[object], log: Path) -> subprocess.Popen[bytes]:
        """Run `words` there, with their output in `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self.command(words),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """Those that run on this machine, without its first ones."""
        space = os.readlink(f"/proc/{self.first.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                is_here = os.readlink(f"/proc/{process.pid}/ns/pid") == space and process.pid != self.first.pid
                if is_here and process.status() != psutil.STATUS_ZOMBIE and process.cmdline()[:1] != ["sleep"]:
                    found.append(process)
        return found


@contextlib.contextmanager
def machines(count: int, directory: Path) -> Iterator[list[Node]]:
    """`count` machines, node1 and so on; files about them go below `directory`."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        switch = _hold(started, "--net", "sleep", "infinity")
        _ip(switch, "link", "add", "bridge", "type", "bridge")
        _ip(switch, "link", "set", "bridge", "up")
        names = [f"node{i}" for i in range(1, count + 1)]
        hosts = directory / "hosts"
        lines = [f"{NETWORK}.{i} {name}" for i, name in enumerate(names, 1)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        nodes = []
        for i, name in enumerate(names, 1):
            nodes.append(Node(name, f"{NETWORK}.{i}", _boot(name, directory, started), switch))
            _plug(nodes[-1])
        yield nodes
    finally:
        for process in started:
            process.kill()  # with it goes the machine's process 1, and with that the machine
            process.wait()


def _boot(name: str, directory: Path, started: list[subprocess.Popen[bytes]]) -> psutil.Process:
    """Process 1 of a new machine."""
    hosts, ready = directory / "hosts", directory / f"{name}.ready"
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc"]
    first = _hold(started, *spaces, "bash", "-c", _BOOT.format(name=name, hosts=hosts, ready=ready))
    deadline = time.monotonic() + 20
    while not ready.exists():
        assert started[-1].poll() is None and time.monotonic() < deadline, f"{name} did not boot"
        time.sleep(0.01)
    return first


def _hold(started: list[subprocess.Popen[bytes]], *words: str) -> psutil.Process:
    """A process in the namespaces that `words` begin with."""
    started.append(subprocess.Popen([*_HELD, *words], stdin=subprocess.DEVNULL))
    deadline = time.monotonic() + 20
    while not (children := psutil.Process(started[-1].pid).children()):
        assert started[-1].poll() is None and time.monotonic() < deadline, words
        time.sleep(0.01)
    return children[0]


def cut(node: Node) -> None:
    """Nothing reaches the machine any more, and nobody is told."""
    _ip(node.switch, "link", "set", node.name, "down")


def _plug(node: Node) -> None:
    """Connect a machine to the bridge."""
    peer = ["peer", "name", "eth0", "netns", str(node.first.pid)]
    _ip(node.switch, "link", "add", node.name, "type", "veth", *peer)
    _ip(node.switch, "link", "set", node.name, "master", "bridge", "up")
    _ip(node.first, "address", "add", f"{node.address}/24", "dev", "eth0")
    _ip(node.first, "link", "set", "eth0", "up")


def start_ray(nodes: Sequence[Node], directory: Path, *, cpus: int, resources: Sequence[str]) -> str:
    """`ray start` on every machine, the first as the head, with `resources` of each in JSON. Returns: the address."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    common = ["--num-cpus", cpus, "--object-store-memory", 200_000_000]
    head, address = ["--head", "--port", PORT, "--include-dashboard=false"], f"{nodes[0].address}:{PORT}"
    for node, offered in zip(nodes, resources, strict=True):
        place = head if node is nodes[0] else ["--address", address]
        own = ["--node-ip-address", node.address, "--resources", offered]
        node.start([*ray, *place, *common, *own], directory / f"ray-{node.name}.log")
        if node is nodes[0]:
            _wait_for_port(node, directory)
    return address


def _wait_for_port(node: Node, directory: Path) -> None:
    connect = f"import socket; socket.create_connection(({node.address!r}, {PORT}), 1)"
    deadline = time.monotonic() + 60
    while subprocess.run(node.command([sys.executable, "-S", "-c", connect]), capture_output=True).returncode:
        assert time.monotonic() < deadline, (directory / f"ray-{node.name}.log").read_text()
        time.sleep(0.2)


def _ip(place: psutil.Process, *words: str) -> None:
    """`ip` in the network of a process."""
    subprocess.run(["nsenter", f"--target={place.pid}", "--net", "ip", *words], check=True, stdin=subprocess.DEVNULL)
