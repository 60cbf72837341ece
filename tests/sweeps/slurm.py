"""Stands where sbatch and squeue would: a queue in the directory $QUEUE, whose jobs go on when they are looked at.

Each look takes a job from PENDING to RUNNING to its end, where it leaves the files of a run whose eval/reward is
1 - |4 - 1e6 lr|, or FAILED with seed=13. The real ones are in tests/slurm.
"""

import json
import os
import sys
from pathlib import Path

QUEUE = Path(os.environ["QUEUE"])
NEXT = {"PENDING": "RUNNING", "RUNNING": "COMPLETED"}


def jobs() -> list[Path]:
    return sorted(QUEUE.glob("*.job"))


def sbatch(arguments: list[str]) -> None:
    if "--test-only" in arguments:
        if "--partition=none" in arguments:
            sys.exit("sbatch: error: invalid partition specified: none")
        return
    waiting = sum(json.loads(path.read_text())["state"] in NEXT for path in jobs())
    job = {"number": 100 + len(jobs()), "arguments": arguments, "state": "PENDING", "beside": waiting}
    (QUEUE / f"{job['number']}.job").write_text(json.dumps(job))
    print(job["number"])


def squeue() -> None:
    if any(name.startswith("SQUEUE_") for name in os.environ):  # each leaves some jobs out, or shows them otherwise
        return
    if (QUEUE / "silent").exists():
        (QUEUE / "silent").unlink()
        sys.exit("slurm_load_jobs error: Unable to contact slurm controller")
    for path in jobs():
        job = json.loads(path.read_text())
        options = dict(argument.lstrip("-").split("=", 1) for argument in job["arguments"] if "=" in argument)
        run = Path(options["comment"])
        if job["state"] in NEXT:
            job["state"] = NEXT[job["state"]]
            if job["state"] == "COMPLETED":
                if options.get("seed") == "13":
                    job["state"] = "FAILED"
                end(run, lr=float(options.get("algorithm.lr", 0)), error="unlucky" * (options.get("seed") == "13"))
            path.write_text(json.dumps(job))
        print(f"{job['number']}|{job['state']}|1:05|None|{run}")


def end(run: Path, *, lr: float, error: str) -> None:
    (run / "log" / "job.log").write_text(error)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "eval/reward": 1 - abs(4 - 1e6 * lr)}) + "\n")
    (run / "ended.json").write_text(json.dumps({"error": error, "seconds": 65.0}))


if __name__ == "__main__":
    sbatch(sys.argv[2:]) if sys.argv[1] == "sbatch" else squeue()
