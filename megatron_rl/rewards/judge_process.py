"""The process of a judge: pickled arguments of its function `judge` in, one line each, and scores out.

Usage: python -P judge_process.py FILE, which has `judge`. Run as a file, not as a module; it and FILE import nothing of
ours.
"""

import base64
import contextlib
import pickle
import runpy
import signal
import sys

_LIMIT_S = 60.0


def main() -> None:
    """Until the owner is gone."""
    judge = runpy.run_path(sys.argv[1])["judge"]
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, _LIMIT_S)  # of processor time; ends it in a hang, too, and in C code
        with contextlib.redirect_stdout(sys.stderr):  # where only scores belong
            score = judge(*pickle.loads(base64.b64decode(line)))
        print(score, flush=True)


if __name__ == "__main__":
    main()
