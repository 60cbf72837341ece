"""What Hydra knows of the launchers `local` and `slurm_grpo`. It finds them in a package of this name only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from megatron_rl.sweeps.local import Local
from megatron_rl.sweeps.slurm import Slurm
from megatron_rl.sweeps.sweep import Batch, Jobs


@dataclass
class LocalOptions:
    """hydra.launcher of hydra/launcher=local."""

    _target_: str = f"{__name__}.LocalLauncher"


@dataclass
class SlurmOptions:
    """hydra.launcher of hydra/launcher=slurm_grpo."""

    _target_: str = f"{__name__}.SlurmLauncher"
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Options of sbatch, by name: {nodes: 2, time: "4:00:00", dependency: "afterok:17", exclusive: true}."""
    at_once: int | None = None
    """Points in Slurm's queue at the same time, waiting ones included; null submits all."""
    poll_s: float = 15.0
    """Between two looks at the queue."""
    script: str | None = None
    """The job script; null is this clone's launch/slurm_grpo.sh."""


class _Points(Launcher):
    """Hands a sweeper's points to the sweep that runs in this process (its task function), which starts them."""

    jobs: Jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """As Hydra calls it."""
        self._sweep, self._config = task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """As Hydra calls it."""
        returned: Sequence[JobReturn] = self._sweep(Batch(self.jobs, self._config, job_overrides, initial_job_idx))
        return returned


class LocalLauncher(_Points):
    """One process after another."""

    def __init__(self) -> None:
        self.jobs = Local()


class SlurmLauncher(_Points):
    """One job of Slurm for each point."""

    def __init__(self, sbatch: DictConfig, at_once: int | None, poll_s: float, script: str | None) -> None:
        options = OmegaConf.to_container(sbatch, resolve=True)
        assert isinstance(options, dict), options
        named = {str(key): value for key, value in options.items()}
        self.jobs = Slurm(sbatch=named, at_once=at_once, poll_s=poll_s, script=script)


ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalOptions, provider="megatron-rl")
ConfigStore.instance().store(group="hydra/launcher", name="slurm_grpo", node=SlurmOptions, provider="megatron-rl")
