"""The arrows of the architecture, read from the source with ast: no backend needs to be installed."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "megatron_rl"
ONLY_IN = {
    "ray": {"cluster", "failures", "pools", "trainer", "rollout"},
    "megatron": {"trainer"},
    "sglang": {"rollout"},
    "hydra": {"config_loading", "sweeps"},
}
OF_OURS = {  # package -> the packages of ours it may import
    "errors": set(),
    "types": set(),
    "config": {"errors"},
    "config_loading": {"errors", "config"},
    "protocols": {"types"},
    "layouts": {"errors"},
    "models": {"errors", "layouts"},
    "formats": {"errors", "layouts"},
    # megatron, through the trainer, only in a process that asks how it names a model's tensors and then ends
    "convert": {"errors", "formats", "layouts", "models", "trainer"},
    "resharding": {"errors", "layouts", "models", "protocols", "types"},
    "algorithms": {"errors", "types", "config"},
    "data": {"errors", "types", "config"},
    "rewards": {"errors", "types", "config"},
    "failures": {"errors"},
    "cluster": {"errors", "failures", "arrangement"},
    "pools": {"errors", "config", "cluster", "arrangement"},
    "arrangement": {"config", "errors"},
    "checkpoint": {"errors", "protocols"},
    "checks": {
        "errors",
        "config",
        "arrangement",
        "formats",
        "layouts",
        "models",
        "rewards",
        "algorithms",
        "megatron_options",
        "memory",
    },
    "memory": {"config", "layouts"},
    "run_plan": {
        *(
            "config",
            "checks",
            "convert",
            "formats",
            "layouts",
            "memory",
            "models",
            "arrangement",
            "resharding",
            "rollout",
        ),
    },
    "megatron_options": {"errors", "config"},
    "sweeps": {
        "errors",
        "config",
        "config_loading",
        "arrangement",
        "progress",
        "records",
        "run_directory",
        "run_plan",
    },
    "trainer": {
        *("errors", "types", "config", "checks", "megatron_options", "memory"),
        *("algorithms", "formats", "layouts", "models", "resharding", "cluster", "pools"),
    },
    "rollout": {
        *("errors", "types", "config", "rewards", "formats", "layouts", "models", "resharding", "cluster"),
        "pools",
    },
}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def violations(path: Path, package: str) -> Iterator[str]:
    for name, line in imports(path):
        top, _, rest = name.partition(".")
        ours = rest.partition(".")[0]
        if top == "megatron_rl" and ours != package and package in OF_OURS and ours not in OF_OURS[package]:
            yield f"{path.relative_to(ROOT)}:{line} {package} may not import megatron_rl.{ours}"
        if top in ONLY_IN and package not in ONLY_IN[top]:
            yield f"{path.relative_to(ROOT)}:{line} {top} may be imported only in {sorted(ONLY_IN[top])}"


def test_imports_follow_the_arrows() -> None:
    wrong = [
        problem
        for path in sorted(ROOT.rglob("*.py"))
        for problem in violations(path, path.relative_to(ROOT).parts[0].removesuffix(".py"))
    ]

    assert wrong == []


def test_a_clone_that_is_not_installed_finds_its_kernels() -> None:
    code = "import megatron_rl.resharding.sender, megatron_rl_kernels; print(megatron_rl_kernels.__file__)"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, env=environment, capture_output=True, text=True)

    assert out.stdout.strip() == str(ROOT.parent / "kernels" / "megatron_rl_kernels" / "__init__.py"), out.stderr


def test_kernels_are_imported_where_they_are_used() -> None:
    """A process on a CPU would pay for Triton in seconds and memory."""
    code = "import sys, megatron_rl, megatron_rl_kernels; print('triton' in sys.modules, 'torch' in sys.modules)"

    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True)

    assert out.stdout == "False True\n", out.stderr


def test_nothing_shadows_the_package_kernels() -> None:
    """PyPI's `kernels`, which transformers and SGLang import, must win over our folder of that name."""
    assert not (ROOT.parent / "kernels" / "__init__.py").exists()
