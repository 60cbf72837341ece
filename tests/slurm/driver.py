"""A small program in place of megatron_rl.main: a step is a moment, and a checkpoint is the number of steps done.

DRIVER says what goes wrong: "exit N" ends it with that code, "exit N SEED" only if that is its seed; "deaf N" ignores
SIGUSR1 and saves at step N only.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import ray

from megatron_rl import cluster
from megatron_rl.checkpoint import STATE, complete
from megatron_rl.config_loading import load_config
from megatron_rl.pools import Pool
from megatron_rl.run_directory import RunDirectory

STEP_S = 0.25
STOPPED = 85
SHOWN = ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Process:
    """One on each node."""

    def describe(self) -> dict[str, str | None]:
        shown = {name: os.environ.get(name) for name in SHOWN}
        return {**shown, "address": ray.util.get_node_ip_address()}

    def work(self) -> None:
        time.sleep(STEP_S)


def main() -> int:
    config = load_config(sys.argv[1:])
    run = RunDirectory(config)
    what, *numbers = os.environ.get("DRIVER", "well").split()
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, (lambda *_: None) if what == "deaf" else (lambda *_: asked.append(1)))
    cluster.start(address=config.cluster.address, cpus=1)
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeName"])
    pool = Pool("trainer", len(nodes), cpus=1, strategy="STRICT_SPREAD")
    run.logs.mkdir(parents=True, exist_ok=True)
    workers = [pool.spawn(Process, index=i, log=run.logs / f"process-{i}.log") for i in range(len(nodes))]
    found = {
        "nodes": {
            n["NodeName"]: {k: n["Resources"][k] for k in ("CPU", "GPU", "trainer", "rollout") if k in n["Resources"]}
            for n in nodes
        },
        "processes": sorted(ray.get([w.describe.remote() for w in workers]), key=lambda p: p["SLURMD_NODENAME"]),
        "cwd": os.getcwd(),
        "pythonpath": os.environ["PYTHONPATH"],
    }
    (run.path / "found.json").write_text(json.dumps(found))
    if what == "exit" and numbers[1:] in ([], [str(config.seed)]):
        print("ends as it was told", flush=True)
        return int(numbers[0])
    before = complete(run.checkpoints)
    first = before[-1][0] + 1 if before else 1
    for step in range(first, config.steps + 1):
        cluster.gather({f"process-{i}": w.work.remote() for i, w in enumerate(workers)}, what="Work", timeout_s=60)
        print(f"step {step}/{config.steps}", flush=True)
        with (run.path / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": step, "eval/reward": step / 10}) + "\n")
        if what == "deaf" and step == int(numbers[0]):
            save(run.checkpoints, step)
        if asked:
            save(run.checkpoints, step)
            return STOPPED
    return 0


def save(directory: Path, step: int) -> None:
    path = directory / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / STATE).write_text("{}")


if __name__ == "__main__":
    sys.exit(main())
