"""A process that compares mathematical answers: pickled ("reference", "response") in, scores out.

Run as a file, not as a module, and imports nothing of ours. It is a process of its own because sympy can hang in C code
that no signal interrupts, and because math_verify's time limits work in a main thread only.
"""

import base64
import pickle
import signal
import sys

from math_verify import parse, verify

_PARSE_TIMEOUT_S = 3
_LIMIT_S = 60.0


def _as_latex(answer: str) -> str:
    """Reference answers are bare ("(1, 2)", "\\frac12"); math_verify reads LaTeX only between dollars or in a box."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"


def judge(reference: str, response: str) -> float:
    """1.0 when the two are mathematically equal, or the same text; else 0.0."""
    if reference.strip() == response.strip():
        return 1.0
    gold = parse(_as_latex(reference), parsing_timeout=_PARSE_TIMEOUT_S)
    found = parse(response, parsing_timeout=_PARSE_TIMEOUT_S)
    return float(verify(gold, found, timeout_seconds=_PARSE_TIMEOUT_S))


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:  # ends when the owner is gone
        signal.setitimer(signal.ITIMER_PROF, _LIMIT_S)  # of processor time; ends it in a hang, too, and in C code
        print(judge(*pickle.loads(base64.b64decode(line))), flush=True)
