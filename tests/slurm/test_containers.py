"""What the job script asks of apptainer and of pyxis, which containers.py stands for."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.machines import ROOT
from tests.slurm.slurm import Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

STEPS = 4
"""Of a job with one node: plan, start, wait, program."""


def run(submit: Callable[..., Job], tmp_path: Path, tool: str, **variables: str) -> tuple[list[Any], Path]:
    """A job with containers.py as `tool` on PATH. Returns: what that noted for each step, and the jobs' TMPDIR."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / tool
    program.write_text(f"#!{sys.executable} -IS\n{Path(__file__).with_name('containers.py').read_text()}")
    program.chmod(0o755)
    (tmp_path / "models").mkdir()
    job = submit(
        "--nodes=1",
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        PYTHONPATH="/of/another/python",
        MRL_MOUNTS=f"{tmp_path / 'models'},{tmp_path}:/data:ro",
        RECORD=str(tmp_path / "record"),
        REAL_SRUN=str(shutil.which("srun")),
        **variables,
    )
    assert job.end() == "COMPLETED 0:0", job.output()
    found = json.loads((tmp_path / "my runs" / "run" / "found.json").read_text())
    assert found["cwd"] == str(ROOT) and found["pythonpath"] == str(ROOT)  # the clone, and nothing of the host's
    return [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()], job.slurm.directory / "local"


def test_apptainer_sees_clone_temporary_directory_and_mounts(submit: Callable[..., Job], tmp_path: Path) -> None:
    noted, local = run(submit, tmp_path, "apptainer", MRL_APPTAINER="/images/a b.sif")

    mounts = f"{ROOT}:{ROOT},{local}:{local},/tmp:/tmp,{tmp_path}/models:{tmp_path}/models,{tmp_path}:/data:ro"
    assert noted == [{"image": "/images/a b.sif", "--nv": True, "--bind": mounts, "--pwd": str(ROOT)}] * STEPS


def test_pyxis_sees_clone_temporary_directory_and_mounts(submit: Callable[..., Job], tmp_path: Path) -> None:
    noted, local = run(submit, tmp_path, "srun", MRL_PYXIS="/images/a b.sqsh")

    mounts = f"{ROOT}:{ROOT},{local}:{local},/tmp:/tmp,{tmp_path}/models:{tmp_path}/models,{tmp_path}:/data:ro"
    wanted = {"--container-image": "/images/a b.sqsh", "--container-mounts": mounts, "--container-workdir": str(ROOT)}
    assert noted == [wanted] * STEPS
