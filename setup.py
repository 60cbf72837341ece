"""Package metadata; versions of dependencies are read from requirements/."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def pins(name: str) -> list[str]:
    """Requirement lines of requirements/<name>, without options and comments."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


setup(
    name="megatron-rl",
    version="0.1.0",
    description="Megatron-native reinforcement learning for MoE language models",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=[
        *find_packages(include=["megatron_rl", "megatron_rl.*"]),
        "megatron_rl.configs",
        *find_packages("kernels"),
    ],
    package_dir={"megatron_rl.configs": "configs", "megatron_rl_kernels": "kernels/megatron_rl_kernels"},
    package_data={
        "megatron_rl.configs": ["*.yaml", "*/*.yaml"],
        # What our SGLang servers find on their path, and nothing else does.
        "megatron_rl.rollout": ["plugin_site/*/*"],
        # What Hydra finds on its path in a sweep.
        "megatron_rl.sweeps": ["plugin_site/*/*"],
        "megatron_rl_kernels.cuda_ops": ["*.cu"],
        "megatron_rl.rollout.sglang_cpu": ["stubs/*/*.py"],
    },
    install_requires=pins("base.txt"),
    extras_require={"gpu": pins("gpu.txt"), "optuna": pins("optuna.txt")},
    entry_points={"console_scripts": ["megatron-rl = megatron_rl.main:main"]},
)
