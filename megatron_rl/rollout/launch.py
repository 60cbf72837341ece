"""The first process of an SGLang server: ties its life to its owner's, then becomes `sglang.launch_server`.

Usage: python -m megatron_rl.rollout.launch OWNER_PID [sglang.launch_server's arguments]
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """SGLang's own children follow this process by the same means, so nothing outlives the owner, even a killed one."""
    owner = int(sys.argv.pop(1))
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        raise SystemExit(f"The owner {owner} of this server ended before it started.")
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
