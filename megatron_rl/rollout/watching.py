"""Which of a server's processes ended first, as the kernel tells it."""

import contextlib
import os
import select
import threading

import psutil

from megatron_rl.rollout.launch import main_thread_is_gone

FIRST_S = 1.0
"""From the end of one of its processes to the server's own when that is the cause; SGLang takes 5 s to follow one."""


def open_processes(server: int) -> dict[int, str]:
    """Descriptors of a server ("") and of its own processes, with their names."""
    names = dict[int, str]()
    children = list[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it ends just now
        names[os.pidfd_open(server)] = ""
        children = psutil.Process(server).children(recursive=True)
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # as one that only helped it to start
            if (name := " ".join(process.cmdline()).strip()).startswith("sglang::"):
                names[os.pidfd_open(process.pid)] = name
    return names


def first_gone(names: dict[int, str], ended: threading.Event, server: int) -> list[str]:
    """Wait for the first end among the processes of a server. Returns their names, none if the server itself is why.

    `names`: of a process' descriptor; the server's own is "". `ended`: is set when the server, pid `server`, has.
    """
    if not names:
        return []
    poll = select.poll()
    for descriptor in names:
        poll.register(descriptor, select.POLLIN)
    # The kernel tells at once, and so which was first: the others follow within milliseconds.
    gone = [names[descriptor] for descriptor, _ in poll.poll() if names[descriptor]]
    # But its children follow the server's main thread, and its others may still end: for seconds on a busy machine.
    return [] if ended.wait(FIRST_S) or main_thread_is_gone(server) else gone
