"""The image's recipe, without a Docker engine: what it copies exists, what it pins is what requirements/ says."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron_rl.config_loading import load_config

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
TOOLS = Path(sys.executable).parent


def instructions(name: str) -> list[str]:
    """What follows each `name`, lines joined."""
    text = re.sub(r"^ *#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def pins(*names: str) -> dict[str, str]:
    """Version of each package that the files pin, under the name that registries give it."""
    lines = [line for name in names for line in (REQUIREMENTS / name).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith(("#", "-", " "))]
    return {re.sub(r"[-_.]+", "-", name.partition("[")[0]).lower(): version for name, version in pairs}


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    command, nobodys = [TOOLS / "hadolint", ROOT / "docker" / "Dockerfile"], {**os.environ, "HOME": str(tmp_path)}
    found = subprocess.run(command, env=nobodys, capture_output=True, text=True)

    assert (found.returncode, found.stdout) == (0, "")


def test_what_it_copies_exists_and_reaches_the_builder() -> None:
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    sources = [s for line in instructions("COPY") if not line.startswith("--from") for s in line.split()[:-1]]

    assert {"megatron_rl/", "requirements/", "setup.py"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source
    assert {line[1:] for line in ignored if line.startswith("!")} == set(sources)


def test_what_no_registry_of_packages_has_is_pinned_once() -> None:
    (cuda, apex, _), build = instructions("ARG")[:3], instructions("FROM")

    assert re.fullmatch(r"CUDA_IMAGE=nvidia/cuda:13\.\d+\.\d+-cudnn-devel-ubuntu24\.04@sha256:[0-9a-f]{64}", cuda)
    assert re.fullmatch(r"APEX_COMMIT=[0-9a-f]{40}", apex)
    assert build == ["${CUDA_IMAGE} AS base", "base AS build", "base AS run"]
    assert not re.search(r"pip install[^\n]*==", DOCKERFILE)  # versions are those of requirements/
    torchs = pins("gpu.lock")["cuda-toolkit"]  # what torch's wheel brings
    assert cuda.partition(":")[2].split(".")[:2] == torchs.split(".")[:2]


def test_it_runs_as_nobody_in_particular_and_says_how_it_is() -> None:
    last = DOCKERFILE[DOCKERFILE.rindex("FROM base AS run") :]

    assert re.findall(r"^USER (.*)", last, flags=re.MULTILINE) == ["1001"]
    assert "HEALTHCHECK" in last


def test_the_lock_has_what_is_asked_for_and_what_runs_without_a_gpu() -> None:
    lock = pins("gpu.lock")

    for asked in (pins("base.txt", "gpu.txt"), pins("base.txt", "cpu.txt", "cpu-nodeps.txt")):
        assert {name: lock.get(name) for name in asked} == asked
    (first,) = re.findall(r"\^\(([\w|]+)\)==", DOCKERFILE)
    assert set(first.split("|")) <= set(lock)
    assert {"sglang-kernel", "flashinfer-python", "sgl-deep-ep", "transformer-engine-torch"} <= set(lock)


def test_the_lock_of_a_machine_without_a_gpu_has_what_is_asked_for() -> None:
    lock = pins("cpu.lock")
    asked = pins("base.txt", "cpu.txt", "dev.txt")

    assert {name: lock.get(name) for name in asked} == asked


@pytest.mark.network
def test_every_version_of_the_lock_is_there_and_goes_with_the_others(tmp_path: Path) -> None:
    command = re.search(r"^lock:.*\n\t(.*)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert command is not None
    words = command[1].replace("$(UV)", str(TOOLS / "uv")).split()
    again = tmp_path / "gpu.lock"
    again.write_text((REQUIREMENTS / "gpu.lock").read_text())  # as `make lock` finds it: no newer versions are taken

    done = subprocess.run([*words[:-1], again], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert again.read_text() == (REQUIREMENTS / "gpu.lock").read_text()


def test_the_package_builds_from_what_is_copied_and_has_every_config(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for line in instructions("COPY"):
        *names, target = line.split()
        for name in names if target.startswith("/source/") else []:
            place = source / target.removeprefix("/source/")
            if name.endswith("/"):
                shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, place)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path]

    subprocess.run([*command, source], check=True, capture_output=True)

    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {f"megatron_rl/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")} <= packed
    python = [path for part in ("megatron_rl", "kernels") for path in (ROOT / part).rglob("*.py")]
    wanted = {str(path.relative_to(ROOT)).removeprefix("kernels/") for path in python}
    assert wanted - packed == set()


def test_what_it_says_of_the_launcher_is_what_the_launcher_reads() -> None:
    readme, launcher = (ROOT / "docker" / "README.md").read_text(), (ROOT / "launch" / "slurm_grpo.sh").read_text()
    said = set(re.findall(r"MRL_[A-Z]+", readme))

    assert said == {"MRL_PYXIS", "MRL_APPTAINER", "MRL_MOUNTS"}
    assert all(f"${{{name}:" in launcher for name in said)
    for words in re.findall(r"(experiment=[^`]*?)\n```", readme.replace("\\\n", " ")):
        load_config(words.split())
