"""Sweeps by hydra/launcher=slurm_grpo."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_rl.sweeps.points import load_all
from tests.slurm.slurm import SMALL, Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SLURM = ("hydra/launcher=slurm_grpo", "hydra.launcher.sbatch.cpus_per_task=4", "hydra.launcher.poll_s=1")
COMMON = ("experiment=cpu_digits", "algorithm.warmup_steps=0", "steps=3")
COMMAND = (".venv/bin/python", "-m", "megatron_rl.main", "-m", *COMMON, *SLURM)


def jobs(slurm: Slurm, directory: Path) -> dict[str, list[str]]:
    """Of each point of a sweep, the states that Slurm has of its jobs, in the order of their submission."""
    found: dict[str, list[str]] = {}
    for line in slurm.run("squeue", "--noheader", "--states=all", "--sort=i", "--format=%T %k").splitlines():
        state, _, comment = line.partition(" ")
        if Path(comment).parent == directory:
            found.setdefault(Path(comment).name, []).append(state)
    return found


def test_a_sweep_is_a_job_for_each_point_and_goes_on_with_what_is_missing(slurm: Slurm, tmp_path: Path) -> None:
    directory = tmp_path / "my sweep"
    command = [*COMMAND, f"hydra.sweep.dir='{directory}'", "seed=1,2,3,4"]

    def sweep(*more: str) -> str:
        line = f"{shlex.join([*command, *more])} 2>&1; echo exit code $?"
        return slurm.run("bash", "-c", line, more=SMALL | {"DRIVER": "exit 3 4"})

    printed = sweep("--dry-run")

    assert printed.endswith("exit code 0") and printed.count("sbatch --parsable --cpus-per-task=4") == 4, printed
    assert jobs(slurm, directory) == {} and not directory.exists()

    printed = sweep()

    assert printed.endswith("exit code 1") and "failed: 1 of 4 points are not done" in printed, printed
    done, failed = ["COMPLETED"], ["FAILED"]
    assert jobs(slurm, directory) == {
        "seed_1": done, "seed_2": done, "seed_3": done, "seed_4": failed,
    }  # fmt: skip
    table = printed[printed.index("point  ") :].splitlines()
    assert [line.split()[:4] for line in table[1:5]] == [
        ["seed_1", "COMPLETED", "0.300", "(step"],  # what the driver says of its third step
        ["seed_2", "COMPLETED", "0.300", "(step"],
        ["seed_3", "COMPLETED", "0.300", "(step"],
        ["seed_4", "FAILED", "-", "-"],
    ]
    log = Path(re.findall(r"/\S+ sweep/seed_4\S+", table[4])[0])
    assert "ends as it was told" in log.read_text()
    assert slurm.run(".venv/bin/python", "-m", "megatron_rl.sweeps", directory).splitlines() == table[:5]

    printed = sweep()

    assert printed.endswith("exit code 1"), printed
    assert jobs(slurm, directory) == {
        "seed_1": done, "seed_2": done, "seed_3": done, "seed_4": [*failed, *failed],
    }  # fmt: skip


def test_an_interrupted_sweep_leaves_its_jobs_and_watches_them_again(slurm: Slurm, tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    sweep = shlex.join([*COMMAND, f"hydra.sweep.dir={directory}", "seed=1,2", "steps=60"])
    until_it_runs = 'until squeue --noheader --states=R --format=%k | grep -q "$0"; do sleep 0.2; done'
    interrupt = f"{sweep} 2>&1 & {until_it_runs}; kill -TERM $!; wait $!; echo exit code $?"

    printed = slurm.run("bash", "-c", interrupt, directory, more=SMALL)

    numbers = [point.job for point in load_all(directory)]
    assert (
        f"interrupted. 2 job(s) go on. The same command watches them again. To end them: scancel {' '.join(numbers)}"
        in printed
    )
    assert printed.endswith("exit code 130"), printed
    assert {state for [state] in jobs(slurm, directory).values()} <= {"PENDING", "RUNNING"}

    printed = slurm.run("bash", "-c", f"{sweep} 2>&1; echo exit code $?", more=SMALL)

    assert printed.endswith("exit code 0"), printed
    assert jobs(slurm, directory) == {"seed_1": ["COMPLETED"], "seed_2": ["COMPLETED"]}
    assert [point.job for point in load_all(directory)] == numbers
