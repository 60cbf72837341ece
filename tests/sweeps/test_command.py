import fcntl
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.sweeps.points import quoted
from tests.sweeps.conftest import PROMPTS

Sweep = Callable[..., int]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["algoritm.lr=1e-6,2e-6"], "Unknown config key 'algoritm.lr'.* Did you mean 'algorithm.lr'"),
        (["parallel=ep2,ep3"], "parallel='ep3' is not one of ep2, single"),
        (["seed"], "'seed' is not key=value"),
        (["seed=1,(2"], "cannot be composed"),
        (["seed=1,2", "--dryrun"], "--dryrun is no option of a sweep"),
        (["seed=1,2", "hydra.run.dir=x"], "hydra.run.dir=x has no effect"),
        (["seed=1,2", "hydra/launcher=basic"], "Choose one of local, slurm_grpo"),
        (["seed=1,2", "hydra.launcher.at_once=2"], "cannot be composed: .*at_once"),
        (["seed=1,2", "hydra.sweeper.max_batch_size=2"], "set hydra.launcher.at_once"),
        (["name=a,b"], "name=a: the sweep places each point itself"),
        (["seed=1,2", "hydra/launcher=slurm_grpo", "hydra.launcher.script=/none"], "/none is not there"),
        (["seed=1,2", "hydra/launcher=slurm_grpo", "hydra.launcher.at_once=0"], "at_once=0 lets nothing run"),
        (["seed=1,2", "hydra/launcher=slurm_grpo", "hydra.launcher.sbatch.job_name=x"], "job-name is set by the sweep"),
        (["seed=1,2", "hydra/launcher=slurm_grpo", "cluster.cpus=4"], "point seed_1: .*cluster.cpus=4 with"),
        (
            ["seed=1,2", "data.path=a", "hydra/launcher=slurm_grpo", "hydra.launcher.script=/clone/launch/run.sh"],
            "data.path=a: jobs run in /clone, and this is .* Write the whole path",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    sweep: Sweep, tmp_path: Path, queue: object, arguments: list[str], message: str
) -> None:
    before = set(tmp_path.iterdir())

    with pytest.raises(ConfigError, match=message):
        sweep(*arguments)

    assert set(tmp_path.iterdir()) - {tmp_path / "runs"} == before
    assert not list(tmp_path.glob("runs/*/*/*"))


def test_one_bad_point_refuses_all_and_every_bad_one_is_named(sweep: Sweep, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        sweep("parallel.ep=1,2,3,5")

    first, *points = str(refusal.value).splitlines()
    assert first == "none of these was started."
    assert [line.partition("=2")[0] for line in points] == [
        "  - point ep_3: trainer.world_size",
        "  - point ep_5: trainer.world_size",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_commands_and_plans_and_leaves_nothing(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "hydra.launcher.sbatch.nodes=2",
        "hydra.launcher.sbatch.exclusive=true",
        "hydra.launcher.script='/a b.sh'",
    )

    code = sweep("algorithm.lr=5e-5,7e-5", "--dry-run", "hydra/launcher=slurm_grpo", *options)

    printed, runs = capsys.readouterr().out, f"{tmp_path}/runs/tried-sweep"
    assert (code, list(tmp_path.iterdir())) == (0, [])
    words = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--job-name=lr_7e-05", f"--comment={runs}/lr_7e-05"]
    words += [f"--output={runs}/lr_7e-05/log/job.log", "--open-mode=append", "/a b.sh", "experiment=cpu_digits"]
    words += [
        f"data.path={PROMPTS}".replace(" ", r"\ "),
        "algorithm.lr=7e-05",
        f"runs_dir={quoted(runs)}",
        "name=lr_7e-05",
    ]
    assert (
        f"lr_7e-05\n  {shlex.join(words)}\n"
        "  GPUs     2 for the trainer and 1 for engines, on 1 node of 8\n"
        "  trainer  tp=1 pp=1 cp=1 ep=2 etp=1\n"
    ) in printed
    assert printed.count("  sync     0.0 GB over the network") == 2


def test_nodes_of_the_cluster_are_asked_of_slurm(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("seed=1,2", "--dry-run", "hydra/launcher=slurm_grpo", "cluster=8xh100", "cluster.nodes=3")

    assert sweep(*common) == 0
    asked = "--nodes=3 --gpus-per-node=8 --cpus-per-task=9"
    assert f"sbatch --parsable {asked} --job-name=seed_1 " in capsys.readouterr().out
    assert sweep(*common, "hydra.launcher.sbatch.gres='gpu:4'") == 0
    assert "sbatch --parsable --gres=gpu:4 --nodes=3 --cpus-per-task=9 --job-name=seed_1 " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="point seed_2: hydra.launcher.sbatch.nodes=2 and cluster.nodes=3"):
        sweep(*common, "hydra.launcher.sbatch.nodes=2")


def test_two_processes_do_not_run_the_same_sweep(sweep: Sweep, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "tried-sweep"
    directory.mkdir(parents=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="Another process runs the sweep .* python -m megatron_rl.sweeps"):
            sweep("seed=1,2")
