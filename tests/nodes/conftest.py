"""Three machines with Ray on them, and runs of the program on the first."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.nodes.bed import Node, machines, start_ray

STEPS = 3
DEADLINE_S = 600.0
"""For anything that should happen; a machine busy with other things takes long to start a server."""
SETTINGS = (
    *("experiment=cpu_digits", f"steps={STEPS}", "prompts_per_step=8", "algorithm.warmup_steps=0", "algorithm.lr=1e-3"),
    *("sft.steps=30", "sft.warmup_steps=0", "sft.lr=3e-3", "sft.prompts_per_step=8", "data.held_out=8"),
    "sampling.max_tokens=3",
)
"""The demo, cut short, which takes prompts that are soon learnt."""
MARKS = ('{"trainer": 1000, "pair": 1000}', '{"trainer": 1000, "pair": 1000, "rollout": 1000}', '{"rollout": 1000}')
"""Ray resources of each machine."""


class Run:
    """The program on the first machine, and what it starts on all."""

    def __init__(self, cluster: "Cluster", name: str, words: Sequence[object]):
        self.nodes, self.path = cluster.nodes, cluster.path / name
        self._output = self.path.with_suffix(".out")
        self.process = self.nodes[0].start([sys.executable, *words], self._output)

    def text(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Until it has printed `text`."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.text():
            assert self.process.poll() is None, f"it ended without {text!r}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {text!r} within {DEADLINE_S:.0f} s:\n{self.text()}"
            time.sleep(0.05)

    def end(self, *, within_s: float = DEADLINE_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running after {within_s:.0f} s:\n{self.text()}") from error

    def find(self, node: Node, title: str) -> psutil.Process:
        """The first process on a machine whose command line matches `title`."""
        found = [p for p in node.processes() if re.search(title, line(p))]
        assert found, [line(p) for p in node.processes()]
        return min(found, key=lambda p: p.create_time())

    def left(self, *, within_s: float = 15.0) -> list[str]:
        """What runs on the machines, Ray's own apart, when nothing has changed for the better in `within_s`."""
        deadline = time.monotonic() + within_s
        while (lines := self._ours()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return lines

    def _ours(self) -> list[str]:
        found = [f"{node.name}: {line(p)}" for node in self.nodes for p in node.processes()]
        return [one for one in found if re.search(r"sglang|megatron.rl|ray::(?!IDLE|\w*Agent)", one)]

    def kill(self) -> None:
        """End it, if it still runs."""
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.send_signal(signal.SIGKILL)
            self.process.wait()


def line(process: psutil.Process) -> str:
    """Its command line or title; nothing when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines 1 and 2 are marked "trainer" and "pair", 2 and 3 "rollout"."""

    nodes: list[Node]
    address: str
    path: Path

    @property
    def settings(self) -> list[str]:
        """Of every run."""
        return [*SETTINGS, f"data.path={self.path / 'prompts.jsonl'}", f"runs_dir={self.path}"]

    def start(self, name: str, *overrides: str) -> Run:
        """A run called `name`."""
        here = [f"name={name}", f"cluster.address={self.address}"]
        return Run(self, name, ["-m", "megatron_rl.main", *self.settings, *here, *overrides])


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid():
        pytest.fail("machines are made of namespaces, which takes root")
    path = tmp_path_factory.mktemp("nodes")
    lines = [json.dumps({"prompt": f"{i:02d}=", "answer": str(i % 10)}) for i in range(100)]
    (path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    with machines(3, path) as nodes:
        yield Cluster(nodes, start_ray(nodes, path, cpus=4, resources=MARKS), path)


@pytest.fixture
def start(cluster: Cluster) -> Iterator[Callable[..., Run]]:
    """`Cluster.start`; what still runs at the end of the test is killed."""
    runs: list[Run] = []

    def begin(name: str, *overrides: str) -> Run:
        runs.append(cluster.start(name, *overrides))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()
