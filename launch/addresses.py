"""Addresses of the node that this runs on, and ports that are free there."""

import contextlib
import os
import socket
import time

import psutil

from megatron_rl.errors import BackendError, ConfigError

FIRST_PORT, PORTS, PORTS_A_JOB = 20_000, 10_000, 10
"""Below the ports that a kernel gives out by itself. What starts together on a node looks at different ones."""
POLL_S = 0.2
ANSWER_S = 3.0
"""For one answer of a node."""


def node_name() -> str:
    """By which Slurm calls it."""
    return os.environ["SLURMD_NODENAME"]


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
                f"MRL_INTERFACE={wanted} is no interface of {node_name()} with an IPv4 address. Set it to one of: "
                f"{listed}."
            )
        return every[wanted], wanted
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        with contextlib.suppress(OSError):
            probe.connect((towards or "192.0.2.1", 9))
        leading = probe.getsockname()[0]
    chosen = [interface for interface, address in every.items() if address == leading or len(every) == 1]
    if not chosen:
        raise ConfigError(
            f"{node_name()} has no interface that clearly leads to other machines, of these: {listed}. Name one with "
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


def wait_for_port(address: str, port: int) -> None:
    """Until someone listens there; whoever started this knows how long that may take."""
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=ANSWER_S).close()
            return
        time.sleep(POLL_S)
