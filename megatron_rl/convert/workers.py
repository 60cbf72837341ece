"""Work in small processes: bounded units over a pool, and single steps whose memory is given back by ending."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_rl.errors import BackendError

PR_SET_PDEATHSIG = 1
KILLED = "most likely because memory ran out. What is done is kept: start the same command again"
LINE_S = 5.0
"""Between two plain lines of progress."""


class Child:
    """Calls functions in one process of its own, where what they import stays until the block ends.

    `start` one, do something else, and take its `result`.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._pipe, os.getpid()))
        self._process.start()
        theirs.close()

    def start(self, function: Callable[..., object], *args: object) -> None:
        self._pipe.send((function, args))

    def result(self) -> Any:
        """Raises: what the function raised, or BackendError when the process was killed."""
        try:
            succeeded, value = self._pipe.recv()
        except EOFError as error:
            raise BackendError(f"The process that asks megatron-core was killed, {KILLED}.") from error
        if not succeeded:
            raise value
        return value

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, other: Connection, owner: int) -> None:
    other.close()
    begin_fork(owner)
    while True:
        function, args = pipe.recv()
        try:
            answer = (True, function(*args))
        except Exception as error:  # noqa: BLE001 # carried to the caller
            answer = (False, error)
        pipe.send(answer)


def over_units[U, R](
    function: Callable[[U], R], units: Sequence[U], nbytes: Sequence[int], *, processes: int, what: str
) -> list[R]:
    """[function(unit) for unit in units], several at a time, with progress; nothing more starts after a failure.

    Raises: what a unit raised, or BackendError when a process was killed.
    """
    if not units:
        return []
    context = multiprocessing.get_context("fork")  # what is not imported yet is not there: a worker starts small
    results: dict[int, R] = {}
    with (
        Meter(what, sum(nbytes)) as meter,
        ProcessPoolExecutor(min(processes, len(units)), context, begin_fork, (os.getpid(),)) as pool,
    ):
        # A large one that came last would be alone.
        order = sorted(range(len(units)), key=lambda i: -nbytes[i])
        futures = {pool.submit(function, units[i]): i for i in order}
        try:
            for future in as_completed(futures):
                i = futures.pop(future)
                results[i] = future.result()
                meter.add(nbytes[i])
        except BrokenProcessPool as error:
            raise BackendError(f"A worker process was killed, {KILLED} with fewer --processes.") from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[i] for i in range(len(units))]


def begin_fork(owner: int) -> None:
    """What a process begins with that was forked from `owner`: it ends when that does, however that ends.

    Signals to the whole group are the owner's to handle.
    """
    # What the owner has thrown away stays: a store of torch's ends by joining its thread, which was not forked. Under
    # its handle libc may have given out one of ours by then, which never ends.
    gc.freeze()
    ctypes.CDLL("libc.so.6", use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if "torch" in sys.modules:
        # Threads are not forked: where the owner has computed with several, OpenMP would wait for them for ever.
        sys.modules["torch"].set_num_threads(1)


class Meter:
    """Bytes done, bytes a second and the time that is left: a bar on a terminal, lines elsewhere."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.done = what, total, 0
        self.console = Console(file=sys.stderr)
        self.started_s = self.printed_s = time.monotonic()
        self._stack = ExitStack()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self.done += nbytes
        if self.console.is_terminal:
            self._paint(nbytes)
            return
        now_s = time.monotonic()
        if self.done < self.total and now_s - self.printed_s < LINE_S:
            return
        self.printed_s = now_s
        rate = self.done / max(now_s - self.started_s, 1e-9)
        left = timedelta(seconds=round((self.total - self.done) / rate))
        text = f"{self.what}  {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB  {rate / 1e6:.0f} MB/s  {left} left"
        self.console.print(text, soft_wrap=True, highlight=False)

    def _paint(self, nbytes: int) -> None:
        if self._bar is None:  # its thread starts after the workers were forked
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = self._stack.enter_context(
                Progress(TextColumn("{task.description}"), *columns, console=self.console)
            )
            self._task = self._bar.add_task(self.what, total=self.total)
        self._bar.advance(self._task, nbytes)


def batches[U](items: Iterable[U], nbytes: Callable[[U], int], limit: int) -> list[list[U]]:
    """Runs of consecutive items of at most `limit` bytes each; a larger item is alone."""
    out: list[list[U]] = []
    size = limit + 1
    for item in items:
        if size + nbytes(item) > limit:
            out.append([])
            size = 0
        out[-1].append(item)
        size += nbytes(item)
    return out
