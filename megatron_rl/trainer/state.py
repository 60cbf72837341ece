"""What a rank saves to resume bit for bit: weights by megatron's distributed checkpoints, the rest in its own file."""

import pickle
import queue
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.formats import manifest

Chunks = Sequence[DistributedDataParallel]


def save_weights(directory: Path, chunks: Chunks) -> None:
    """Write the weights so that any layout can read them; every rank calls this."""
    if torch.distributed.get_rank() == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    # For its queue megatron would start a process, which takes seconds and outlives a rank that is killed.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(_sharded(chunks), str(directory))


def load_converted(directory: Path, chunks: Chunks) -> None:
    """Read a converted checkpoint; the ranks share out its files, and compare each with its manifest."""
    if written := manifest.read(directory):
        mine = sorted(written.files)[dist.get_rank() :: dist.get_world_size()]
        manifest.check_files(directory, written, mine)
    load_weights(directory, chunks)


def load_weights(directory: Path, chunks: Chunks) -> None:
    """Read what `save_weights` wrote, on this or another layout; every rank calls this."""
    if not directory.is_dir():
        raise DataError(
            f"{directory} does not exist: this is no checkpoint of ours. Resume from another, or start anew."
        )
    try:
        loaded = dist_checkpointing.load(_sharded(chunks), str(directory))
    except CheckpointException as error:
        causes = {f"{type(cause).__name__} {cause}".strip() for cause, _ in error.failures.values()}
        raise _damaged(directory, "; ".join(sorted(causes))) from error
    for i, chunk in enumerate(chunks):
        missing, unexpected = chunk.module.load_state_dict(loaded[f"chunk{i}"], strict=False)
        wrong = [name for name in [*missing, *unexpected] if not name.endswith("_extra_state")]
        assert not wrong, wrong


def _sharded(chunks: Chunks) -> dict[str, Any]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {f"chunk{i}": chunk.module.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}


def rank_state(optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Optimizer, scheduler and random state of this rank; tensors are the live ones."""
    return {
        "optimizers": [_optimizer_state(o) for o in optimizer.chained_optimizers],
        "scheduler": scheduler.state_dict(),
        "random": {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
            "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
        },
    }


@torch.no_grad()
def load_rank_state(state: Mapping[str, Any], optimizer: Any, scheduler: Any) -> None:
    """Put back what `rank_state` gave, on the same layout."""
    for one, saved in zip(optimizer.chained_optimizers, state["optimizers"], strict=True):
        if saved is None:
            continue
        # torch's own load: megatron's gives all parameters one `step` tensor, which then counts once for each of them.
        one.optimizer.load_state_dict(_with_settings(saved["inner"], one.optimizer.param_groups))
        for parameter, value in zip(_main_parameters(one), saved["parameters"], strict=True):
            parameter.copy_(value)
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"]["cpu"])
    if state["random"]["cuda"] is not None:
        torch.cuda.set_rng_state(state["random"]["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["random"]["tracker"])


def _with_settings(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer's saved state with the settings of `groups`: a resumed run goes by its config."""
    position = ("params", "step")  # of the state; Transformer Engine's Adam counts steps by group
    return {
        **saved,
        "param_groups": [
            {**new, **{key: old[key] for key in position if key in old}}
            for old, new in zip(saved["param_groups"], groups, strict=True)
        ],
    }


def _optimizer_state(optimizer: Any) -> dict[str, Any] | None:
    if optimizer.is_stub_optimizer:
        return None
    return {"inner": optimizer.optimizer.state_dict(), "parameters": [p.detach() for p in _main_parameters(optimizer)]}


def _main_parameters(optimizer: Any) -> list[Tensor]:
    """What the inner optimizer updates: float32 copies, this rank's shards of them when they are distributed."""
    return [p for group in optimizer.optimizer.param_groups for p in group["params"]]


def read(path: Path) -> dict[str, Any]:
    """A rank's own file; on a rank that the saved layout did not have, rank 0's, for `check_same_layout` to refuse."""
    if not path.exists():
        path = path.with_name("rank-0.pt")
    if not path.exists():
        raise DataError(f"{path} does not exist: this is no checkpoint of ours. Resume from another, or start anew.")
    try:
        return torch.load(path, weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise _damaged(path, f"{type(error).__name__} {error}") from error


def _damaged(path: Path, cause: str) -> DataError:
    return DataError(
        f"{path} is damaged ({cause[:200]}): it was changed or cut after it was written. Remove the directory "
        f"{path.parent}: the same command then resumes from the checkpoint before it, or starts anew where there is "
        "none."
    )


def layout_of(config: Config) -> dict[str, Any]:
    """Config keys that a rank's optimizer shards depend on, with their values."""
    names = ("world_size", "dtype", "distributed_optimizer")
    return {
        **{f"parallel.{name}": value for name, value in vars(config.parallel).items()},
        **{f"trainer.{name}": getattr(config.trainer, name) for name in names},
    }


def check_same_layout(saved: Mapping[str, Any], now: Mapping[str, Any], directory: Path) -> None:
    """Raises: ConfigError when the optimizer was saved under another layout."""
    changed = {key: (saved.get(key), value) for key, value in now.items() if saved.get(key) != value}
    if changed:
        text = ", ".join(f"{key} was {a}, is {b}" for key, (a, b) in changed.items())
        raise ConfigError(
            f"{directory} holds optimizer state of another layout: {text}. Its shards do not fit these ranks. Resume "
            "with the saved values, or start a new run from an export of these weights (model.path)."
        )


def check_reference(saved: bool, *, needed: bool, directory: Path) -> None:
    """Raises: ConfigError when the loss now needs a reference and the run that saved had frozen none."""
    if needed and not saved:
        raise ConfigError(
            f"{directory} holds no reference weights: it was saved with algorithm.kl_coef=0, and its weights are no "
            "longer where that run began. Set algorithm.kl_coef=0, or start a new run with another name."
        )
