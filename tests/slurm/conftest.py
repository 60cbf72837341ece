"""One Slurm for all tests, and jobs that run the small driver on it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.slurm.machines import refusal
from tests.slurm.slurm import SCRIPT, SMALL, Job, Slurm, running


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    if reason := refusal():
        pytest.fail(reason, pytrace=False)
    with running(3) as slurm:
        yield slurm


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`submit(options, steps=4, ...)`: a job from tmp_path with its run in `tmp_path/my runs/run`, of the small driver.

    Where driver is None, of the program itself. At the end of the test no job is left, and all nodes are on.
    """
    jobs = []

    def do(
        *options: object,
        driver: str | None = "well",
        steps: int = 4,
        name: str = "run",
        more: Sequence[str] = (),
        script: Path = SCRIPT,
        **environment: object,
    ) -> Job:
        own = (f"name={name}", f"runs_dir={tmp_path / 'my runs'}", f"steps={steps}")
        small = {} if driver is None else SMALL | {"DRIVER": driver}
        job = slurm.submit(
            *("experiment=cpu_digits", "algorithm.warmup_steps=0", *own, *more),
            script=script,
            cwd=tmp_path,
            options=["--cpus-per-task=4", f"--output={tmp_path}/%j.out", *options],
            more=small | {key: str(value) for key, value in environment.items()},
        )
        jobs.append(job)
        return job

    yield do
    for job in jobs:
        slurm.run("scancel", "--quiet", job.number)
    for name in slurm.names:
        slurm.start_node(name)
