import os
import subprocess
import sys
from pathlib import Path


def test_every_kernel_equals_its_reference_in_tritons_interpreter() -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-m", "interpreted", str(here)]

    run = subprocess.run(
        command,
        cwd=here.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )

    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
