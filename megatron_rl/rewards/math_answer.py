"""Mathematical equality with the reference answer, by the math-verify library."""

import json
import logging
import select
import subprocess
import sys
from pathlib import Path

from megatron_rl.errors import BackendError
from megatron_rl.rewards.types import RewardFunction, reference_answer
from megatron_rl.types import Prompt

logger = logging.getLogger(__name__)

# The judge gives up on its own after 3 s each for reference, response and comparison.
TIMEOUT_S = 15.0
_START_TIMEOUT_S = 60.0  # importing sympy on a busy machine


class _Judge:
    """A judging process, started on first use and replaced when it hangs or dies."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.process: subprocess.Popen[str] | None = None

    def ask(self, reference: str, response: str) -> float | None:
        """The score; None when the judge hung or died over it.

        Raises: BackendError when the judge does not start.
        """
        if self.process is None:
            # -P: its own directory must not come first on the path, where `types.py` would hide the standard one.
            command = [sys.executable, "-P", str(Path(__file__).with_name("math_judge.py"))]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if self._exchange("0", "0", _START_TIMEOUT_S) is None:
                raise BackendError(
                    f"The math judge gave no answer within {_START_TIMEOUT_S:.0f} s of its start; see "
                    f'stderr, or run it by hand: echo \'["0", "0"]\' | {" ".join(command)}'
                )
        return self._exchange(reference, response, self.timeout_s)

    def _exchange(self, reference: str, response: str, timeout_s: float) -> float | None:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        line = ""
        try:
            self.process.stdin.write(json.dumps([reference, response]) + "\n")
            self.process.stdin.flush()
            if select.select([self.process.stdout], [], [], timeout_s)[0]:
                line = self.process.stdout.readline()
        except BrokenPipeError:
            logger.warning("the math judge had ended with exit code %s", self.process.wait())
        if line:
            return float(line)
        self.stop()
        return None

    def stop(self) -> None:
        """Kill the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def math_answer(*, timeout_s: float = TIMEOUT_S) -> RewardFunction:
    """A reward of 1.0 for a response whose final mathematical expression equals the reference answer, else 0.0.

    A comparison that takes longer than `timeout_s`, or kills its judge, scores 0.0.
    """
    judge = _Judge(timeout_s)

    def reward(response: str, prompt: Prompt) -> float:
        score = judge.ask(reference_answer(prompt), response)
        if score is None:
            logger.warning(
                "no verdict within %.0f s on prompt %s, response %r: scored 0", timeout_s, prompt.id, response[-80:]
            )
            return 0.0
        return score

    return reward
