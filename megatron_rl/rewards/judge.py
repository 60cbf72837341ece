"""A process that judges responses for a reward, which may hang on some text where no signal of Python's interrupts."""

import base64
import logging
import pickle
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_rl.errors import BackendError

logger = logging.getLogger(__name__)

TIMEOUT_S = 15.0
"""For one verdict. Above the 9 s in which math_judge.py gives up on its own: 3 for each of its three stages."""
_START_TIMEOUT_S = 60.0  # importing sympy on a busy machine


class Judge:
    """Runs `judge` of a file of this directory in a process, which it replaces when that hangs or dies.

    The process prints a line when it is ready; then one line in, a pickled question, is one line out, a score.
    """

    def __init__(self, file: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        # -P: its own directory must not come first on the path, where `types.py` would hide the standard one.
        here = Path(__file__).parent
        self._command = [sys.executable, "-P", str(here / "judge_process.py"), str(here / file)]
        self._is_ready = False
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *question: Any) -> float | None:
        """The score; None when the judge hung or died over it.

        Raises: BackendError when the judge does not start.
        """
        if self.process.returncode is not None:
            self.process, self._is_ready = self._start(), False
        if not self._is_ready and not self._line(_START_TIMEOUT_S):
            self.stop()
            raise BackendError(
                f"The judge of a reward was not ready within {_START_TIMEOUT_S:.0f} s of its start, or ended; see "
                f"stderr, or run it by hand: {' '.join(self._command)} < /dev/null"
            )
        self._is_ready = True
        line = ""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(base64.b64encode(pickle.dumps(question)).decode() + "\n")
            self.process.stdin.flush()
            line = self._line(self.timeout_s)
        except BrokenPipeError:
            logger.warning("the judge had ended with exit code %s", self.process.wait())
        if line:
            return float(line)
        self.stop()
        return None

    def _line(self, timeout_s: float) -> str:
        assert self.process.stdout is not None
        is_there = select.select([self.process.stdout], [], [], timeout_s)[0]
        return self.process.stdout.readline() if is_there else ""

    def stop(self) -> None:
        """Kill the process; the next question starts another."""
        self.process.kill()
        self.process.wait()
