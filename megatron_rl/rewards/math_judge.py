"""Compares mathematical answers, in a process of its own (judge_process.py).

sympy can hang in C code that no signal interrupts, and math_verify's time limits work in a main thread only.
"""

from math_verify import parse, verify

_PARSE_TIMEOUT_S = 3


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
