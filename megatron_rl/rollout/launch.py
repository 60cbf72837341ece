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
    """Wait until a process group whose first process has ended is gone; kill what does not go by itself.

    Python's resource tracker is the last to go: it frees shared memory that killed processes have left.
    """
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
