"""The shell scripts by themselves."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.slurm.machines import ROOT
from tests.slurm.slurm import SMALL

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SCRIPTS = (
    "launch/slurm_grpo.sh",
    "launch/local.sh",
    ".ci/run",
    "requirements/install.sh",
    "tests/slurm/machine.sh",
    "tests/slurm/driver.sh",
    "tests/slurm/no_ray.sh",
)


def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def local(tmp_path: Path, *, driver: str, steps: int) -> subprocess.Popen[str]:
    """launch/local.sh of a clone whose path has a space, started elsewhere, with the small driver."""
    clone = tmp_path / "a clone"
    clone.symlink_to(ROOT)
    return subprocess.Popen(
        [clone / "launch/local.sh", *("experiment=cpu_digits", "name=run", f"runs_dir={tmp_path}", f"steps={steps}")],
        cwd=tmp_path,
        env={**os.environ, **SMALL, "DRIVER": driver},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_locally_the_exit_code_is_the_programs(tmp_path: Path) -> None:
    assert local(tmp_path, driver="exit 3", steps=4).wait() == 3


def test_locally_sigusr1_reaches_the_program(tmp_path: Path) -> None:
    process = local(tmp_path, driver="well", steps=1000)
    assert process.stdout is not None
    assert any("step 2/" in line for line in process.stdout)  # reads no further

    process.send_signal(signal.SIGUSR1)

    assert process.wait() == 85
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
