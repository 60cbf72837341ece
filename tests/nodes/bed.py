"""Machines of a cluster on this one: each has a network, a host name, processes, /tmp/ray and /dev/shm of its own.

They share the file system, as nodes of a cluster do, and lie on one bridge. Needs root. Whatever runs on a node ends
with it.
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
    cable: str
    """Of its network, at the other end."""

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
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return [p for p in found if p.pid != self.first.pid and p.cmdline()[:1] != ["sleep"]]


@contextlib.contextmanager
def machines(count: int, directory: Path) -> Iterator[list[Node]]:
    """`count` machines, node1 and so on; files about them go below `directory`."""
    bridge = f"br{os.getpid()}"
    _run("ip", "link", "add", bridge, "type", "bridge")
    started: list[subprocess.Popen[bytes]] = []
    try:
        _run("ip", "link", "set", bridge, "up")
        names = [f"node{i}" for i in range(1, count + 1)]
        hosts = directory / "hosts"
        lines = [f"{NETWORK}.{i} {name}" for i, name in enumerate(names, 1)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        nodes = []
        for i, name in enumerate(names, 1):
            nodes.append(Node(name, f"{NETWORK}.{i}", _boot(name, directory, started), f"{bridge}n{i}"))
            _plug(nodes[-1], bridge)
        yield nodes
    finally:
        for process in started:
            process.kill()  # with it goes the machine's process 1, and with that the machine
            process.wait()
        _run("ip", "link", "del", bridge)


def _boot(name: str, directory: Path, started: list[subprocess.Popen[bytes]]) -> psutil.Process:
    """Process 1 of a new machine."""
    hosts, ready = directory / "hosts", directory / f"{name}.ready"
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    script = _BOOT.format(name=name, hosts=hosts, ready=ready)
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "bash", "-c", script]
    started.append(subprocess.Popen(words, stdin=subprocess.DEVNULL))
    deadline = time.monotonic() + 20
    while not ready.exists():
        assert started[-1].poll() is None and time.monotonic() < deadline, f"{name} did not boot"
        time.sleep(0.01)
    return psutil.Process(started[-1].pid).children()[0]


def cut(node: Node) -> None:
    """Nothing reaches the machine any more, and nobody is told."""
    _run("ip", "link", "set", node.cable, "down")


def _plug(node: Node, bridge: str) -> None:
    """Connect a machine to the bridge."""
    _run("ip", "link", "add", node.cable, "type", "veth", "peer", "name", "eth0", "netns", str(node.first.pid))
    _run("ip", "link", "set", node.cable, "master", bridge, "up")
    _run(*node.command(["ip", "address", "add", f"{node.address}/24", "dev", "eth0"]))
    _run(*node.command(["ip", "link", "set", "eth0", "up"]))


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


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
