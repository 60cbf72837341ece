"""The first process of an SGLang server: ties its life to its owner's, then becomes `sglang.launch_server`.

Usage: python -m megatron_rl.rollout.launch OWNER_PID [sglang.launch_server's arguments]
"""

import contextlib
import ctypes
import os
import runpy
import select
import signal
import sys
import time
from pathlib import Path

import setproctitle

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0
"""For a group to end by itself."""


def main() -> None:
    """Nothing of the server outlives the owner, even a killed one."""
    follow(int(sys.argv.pop(1)))
    runpy.run_module("sglang.launch_server", run_name="__main__")


def follow(owner: int) -> None:
    """End this process, the first of its process group, with its parent `owner`, and its whole group with it.

    SGLang's own processes follow their parent from the moment they run, and live on when it dies before. So a small
    process waits for the end of the first one, then for that of the others, and kills what is left of the group.
    """
    group = os.getpid()
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        raise SystemExit(f"The owner {owner} of this server ended before it started.")
    # SGLang's processes are found by the titles that they set after a fork. To set one, the library looks for the
    # command line just before the first variable of the environment, and SGLang changes variables: it looks now.
    setproctitle.getproctitle()
    first = os.pidfd_open(group)
    if os.fork() == 0:
        setproctitle.setproctitle(f"megatron-rl: waits for the end of {group}")  # else it looks like the server
        os.setsid()
        select.select([first], [], [])
        end_group(group)
        os._exit(0)
    os.close(first)


def end_group(group: int) -> None:
    """Wait until no process of a group, whose first has ended, runs; kill what does not go by itself.

    Python's resource tracker is the last to go: it frees shared memory that killed processes have left.
    """
    if _outlasts_grace(group):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        _outlasts_grace(group)


def _outlasts_grace(group: int) -> bool:
    """Whether a process of the group still runs when GRACE_S have passed."""
    deadline = time.monotonic() + GRACE_S
    while (runs := _runs(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return runs


def _runs(group: int) -> bool:
    """Whether a process of the group does. In a container, nobody may ask for the ends of those that do not."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # it is gone by now
            if name.isdigit() and os.getpgid(int(name)) == group and _lives(int(name)):
                return True
    return False


def _lives(pid: int) -> bool:
    """Whether any thread of it does: others may end after the main one, and hold its memory and ports until then.

    Raises: OSError when the process is gone.
    """
    return not main_thread_is_gone(pid) or len(os.listdir(f"/proc/{pid}/task")) > 1


def main_thread_is_gone(pid: int) -> bool:
    """Whether the main thread of a process has ended; others of it may live."""
    with contextlib.suppress(OSError):  # so has all of it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    return True


if __name__ == "__main__":
    main()
