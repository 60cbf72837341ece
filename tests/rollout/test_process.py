"""What a server's log says went wrong."""

from megatron_rl.rollout.process import server_error


def test_the_error_of_a_traceback_is_found_among_other_lines() -> None:
    log = """[2026-01-01 00:00:00] INFO: starting
[2026-01-01 00:00:01] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    x()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.

[2026-01-01 00:00:02] Received sigquit from a child process.
"""

    assert server_error(log) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."


def test_an_error_is_told_once_and_the_last_come_last() -> None:
    log = "ValueError: first\nRuntimeError: second\nValueError: first\n"

    assert server_error(log) == "ValueError: first\nRuntimeError: second"


def test_a_log_without_an_error_shows_its_end() -> None:
    assert server_error("\n".join(str(i) for i in range(40))) == "\n".join(str(i) for i in range(25, 40))
