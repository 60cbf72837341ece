"""Which of a server's processes ended first."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from megatron_rl.rollout import watching
from megatron_rl.rollout.watching import first_gone, open_processes

MAIN_THREAD_GONE = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize(
    ("ends", "gone"),
    [("whole", []), ("main thread", []), ("child", ["sglang::scheduler"])],
    ids=str,
)
def test_a_child_that_is_gone_before_the_server_has_ended_may_have_followed_it(
    ends: str, gone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children of a killed server go with its main thread, while others still end: for seconds on a busy machine."""
    ended = threading.Event()
    program = MAIN_THREAD_GONE if ends == "main thread" else "print('ready', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, "-c", program], **pipes)
    processes = [server, *(subprocess.Popen(["sleep", "1000"]) for _ in range(2))]
    descriptors = [os.pidfd_open(process.pid) for process in processes]
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 20
        while ends == "main thread" and psutil.Process(server.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        processes[1].kill()
        if ends == "whole":
            monkeypatch.setattr(watching, "FIRST_S", 60.0)
            threading.Timer(0.25, ended.set).start()

        names = dict(zip(descriptors, ["", "sglang::scheduler", "sglang::detokenizer"], strict=True))
        assert first_gone(names, ended, server.pid) == gone
    finally:
        for process, descriptor in zip(processes, descriptors, strict=True):
            process.kill()
            process.communicate()
            os.close(descriptor)


def test_a_helper_that_ends_meanwhile_leaves_the_others_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as helper:
        ended = psutil.Process(helper.pid)
    script = "(exec -a sglang::scheduler sleep 1000) & exec sleep 1000"
    server = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    children = psutil.Process.children
    try:
        while not any("sglang::" in " ".join(p.cmdline()) for p in psutil.Process(server.pid).children()):
            time.sleep(0.01)
        monkeypatch.setattr(psutil.Process, "children", lambda self, **how: [ended, *children(self, **how)])

        watched = open_processes(server.pid)

        assert list(watched.values()) == ["", "sglang::scheduler 1000"]
        for descriptor in watched:
            os.close(descriptor)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
