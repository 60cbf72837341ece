"""One Slurm for all tests, and jobs that run the small driver on it."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Job, running

NEEDED = ("slurmctld", "slurmd", "srun", "munged", "shellcheck", "nsenter", "ip")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    missing = [program for program in NEEDED if shutil.which(program) is None]
    assert not missing, (
        f"{', '.join(missing)} not found. apt-get install slurmctld slurmd slurm-client munge shellcheck iproute2"
    )
    with running(3) as cluster:
        yield cluster


@pytest.fixture
def submit(slurm: Cluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`submit(options, driver="", steps=4, ...)`: the small driver, with its run below tmp_path/runs/run.

    At its end, however it ends, no job is left.
    """
    jobs = []

    def do(
        *options: object,
        driver: str = "",
        steps: int = 4,
        name: str = "run",
        more: Sequence[str] = (),
        **environment: object,
    ) -> Job:
        job = slurm.submit(
            *(
                "experiment=cpu_digits",
                "algorithm.warmup_steps=0",
                f"name={name}",
                f"runs_dir={tmp_path / 'runs'}",
                f"steps={steps}",
                *more,
            ),
            options=["--cpus-per-task=4", f"--output={tmp_path}/%j.out", *options],
            environment={
                "MRL_MODULE": "tests.slurm.driver",
                "DRIVER": driver,
                **{key: str(value) for key, value in environment.items()},
            },
        )
        jobs.append(job)
        return job

    yield do
    for job in jobs:
        slurm.run("scancel", "--quiet", job.number)
    for name in slurm.names:
        slurm.start_node(name)
