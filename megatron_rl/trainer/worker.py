"""One rank of the trainer: builds its part of the model, computes log-probabilities, updates, saves, exports.

A plain class; `trainer.MegatronTrainer` runs one in each actor. Unless said otherwise all ranks call a method together.
"""

import json
import logging
import os
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.algorithms.losses import LossInputs, sft_loss
from megatron_rl.algorithms.recipes import RECIPES
from megatron_rl.checks import topology_of
from megatron_rl.config import Config, OptimizerConfig
from megatron_rl.errors import BackendError
from megatron_rl.formats.torch_dist import is_torch_dist
from megatron_rl.layouts.compile import hf_layouts, megatron_layouts
from megatron_rl.models import load_architecture, load_table
from megatron_rl.pools import own_address
from megatron_rl.resharding.sender import Sender
from megatron_rl.resharding.spec import Push, SendReport, SyncSpec
from megatron_rl.trainer import build, optim, state, step, weights
from megatron_rl.trainer.micro_batch import MicroBatch, Row
from megatron_rl.trainer.rank_batch import Logprobs, RankBatch, micro_batches, store

logger = logging.getLogger(__name__)


class Worker:
    """One megatron rank."""

    def __init__(self, config: Config, rank: int, model_directory: str):
        self.config, self.rank = config, rank
        self.source = Path(model_directory)
        hf = json.loads((self.source / "config.json").read_text())
        self.model, self.table = load_architecture(hf), load_table(hf)
        self.topology = topology_of(config, self.table)
        self.layouts = megatron_layouts(self.table, self.topology, rank, dtype=config.trainer.dtype)
        self.phase = ""
        self.updates = 0
        self.reference: dict[str, Tensor] | None = None
        self.sender: tuple[SyncSpec, Sender] | None = None

    def address(self) -> str:
        """`tcp://host:port` where the ranks can meet; for rank 0, which listens there from now on."""
        # Held until the ranks meet: a port that is only looked up may be another process's by then. The listener is
        # ours because torch's would be open to every network; `multi_tenant` lets init_process_group find the store in
        # place of starting its own.
        listener = socket.create_server((own_address(), 0), backlog=self.topology.world_size)
        host, port = listener.getsockname()
        self.meeting = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )
        return f"tcp://{host}:{port}"

    def build(self, address: str) -> int:
        """Meet the other ranks at `address`, build the model, read its weights. Returns: this data-parallel rank.

        Raises: ConfigError, LayoutError, DataError when config, model and checkpoint do not go together.
        """
        trainer = self.config.trainer
        # The end of this process's log is quoted in errors: keep what megatron and torch repeat out of it.
        warnings.filterwarnings("ignore", module=r"(torch|megatron)\.")
        logging.getLogger("megatron").setLevel(logging.ERROR)
        torch.set_num_threads(trainer.threads_per_rank)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=address, rank=self.rank, world_size=trainer.world_size)
        has_cuda = build.start_megatron(self.model, self.config.parallel, self.topology, seed=self.config.seed)
        self.device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
        self.megatron = build.transformer_config(self.model, self.config.parallel, trainer, has_cuda=has_cuda)
        self.chunks = build.build_chunks(
            self.model, self.megatron, self.topology, distributed_optimizer=trainer.distributed_optimizer
        )
        self.tensors = weights.named_tensors(self.chunks, self.layouts)
        if is_torch_dist(self.source):
            state.load_converted(self.source, self.chunks)
        else:
            pinned = {layout.name: layout.dtype for layout in hf_layouts(self.table, dtype="") if layout.dtype}
            weights.import_hf(self.source, self.tensors, self.layouts, aliases=self.table.aliases, pinned=pinned)
        layers = [f"{c.layers.start} to {c.layers.stop - 1}" for c in self.topology.chunks(self.rank)]
        size = sum(tensor.numel() for tensor in self.tensors.values()) / 1e6
        logger.info("%s: layers %s, %.3f M parameters", self.topology.coordinates(self.rank), ", ".join(layers), size)
        return self.topology.coordinates(self.rank).dp

    def begin(self, phase: str) -> None:
        """Start a phase ("sft" or "rl") with a fresh optimizer and schedule; "rl" may freeze a reference."""
        settings, steps = self._settings(phase)
        distributed = self.config.trainer.distributed_optimizer
        self.optimizer, self.scheduler = optim.build(
            self.chunks, settings, self.megatron, steps=steps, distributed=distributed
        )
        self.phase, self.updates, self.reference = phase, 0, None
        if phase == "rl" and RECIPES[self.config.algorithm.recipe].needs_reference(self.config.algorithm):
            self.reference = {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()}

    def _settings(self, phase: str) -> tuple[OptimizerConfig, int]:
        config = self.config
        if phase == "rl":
            return config.algorithm, config.steps * config.algorithm.mini_batches
        return config.sft, config.steps if config.mode == "sft" else config.sft.steps

    def logprobs(self, batch: RankBatch) -> Any:
        """A pass without gradients, for what the loss will need besides the current log-probabilities.

        Returns: `Logprobs`, or a Ray reference to it, on one rank of each data-parallel rank; None on the others.
        """
        rows = [micro for mini in micro_batches(batch) for micro in mini]
        old = self._forward(rows) if self.config.algorithm.mini_batches > 1 else None
        reference = None
        if self.reference is not None:
            with weights.swapped(self.tensors, self.reference):
                reference = self._forward(rows)
        return store(Logprobs(old, reference)) if self._reports() else None

    def _reports(self) -> bool:
        return (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    def _forward(self, rows: Sequence[Sequence[Row]]) -> np.ndarray:
        """float32 [N]: log-probabilities of all response tokens, on the last pipeline stage; empty elsewhere."""

        def keep(batch: MicroBatch, logprobs_N: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            whole = logprobs_N.new_zeros(batch.responses)
            whole[batch.places_N] = logprobs_N
            if self.config.parallel.cp > 1:
                dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
            return logprobs_N.sum(), whole

        with torch.no_grad():
            kept = self._run(rows, keep, forward_only=True)
        return torch.cat(kept).cpu().numpy() if kept else np.empty(0, np.float32)

    def _run(self, rows: Sequence[Sequence[Row]], loss: step.Loss, *, forward_only: bool) -> list[Any]:
        return step.run(
            self.chunks,
            step.pack_all(rows, device=self.device),
            loss,
            vocab_size=self.model.vocab_size,
            temperature=self.config.sampling.temperature if self.phase == "rl" else 1.0,
            forward_only=forward_only,
        )

    def gradients(self, rows: Sequence[Sequence[Row]]) -> dict[str, float]:
        """Fill the gradient buffers with the mean over tokens of one mini-batch. Returns its metrics per token.

        Only the last pipeline stage returns all of them; `loss` and `tokens` (a sum) are on every rank.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        kept = self._run(rows, self._loss, forward_only=False)
        sums = step.sum_over_ranks(kept, device=self.device)
        tokens = sums.pop("tokens")
        return {**{name: value / max(tokens, 1.0) for name, value in sums.items()}, "tokens": tokens}

    def update(self, batch: RankBatch) -> dict[str, float]:
        """One optimizer step per mini-batch. Returns metrics averaged over tokens and mini-batches; tokens summed.

        Raises: BackendError when a loss or gradient is not finite; weights are as before that optimizer step.
        """
        results = []
        for rows in micro_batches(batch):
            metrics = self.gradients(rows)
            norm = optim.optimizer_step(self.optimizer, self.scheduler, loss=metrics["loss"], update=self.updates + 1)
            self.updates += 1
            results.append({**metrics, "grad_norm": norm, "lr": optim.learning_rate(self.optimizer)})
        means = {name: sum(r[name] for r in results) / len(results) for name in results[0]}
        return {**means, "tokens": sum(r["tokens"] for r in results)}

    def _loss(self, batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # Sums of float32 over the whole micro-batch; gradients are divided by the tokens of all of them at the end.
        inputs = LossInputs(
            logprobs_N=logprobs_N,
            old_logprobs_N=batch.values.get("old", logprobs_N.detach()),
            rollout_logprobs_N=batch.values.get("rollout", logprobs_N.detach()),
            reference_logprobs_N=batch.values.get("reference"),
            entropy_N=entropy_N,
            advantages_N=batch.values.get("advantages", torch.zeros_like(entropy_N)),
        )
        if self.phase == "sft":
            loss, sums = sft_loss(inputs, self.config.sft)
        else:
            loss, sums = RECIPES[self.config.algorithm.recipe].loss(inputs, self.config.algorithm)
        return loss, {**sums, "tokens": torch.tensor(len(logprobs_N))}

    def save(self, directory: str) -> None:
        """Write weights, optimizer, schedule, random state and reference below `directory`, which exists."""
        root = Path(directory)
        try:
            state.save_weights(root / "weights", self.chunks)
            saved = {**state.rank_state(self.optimizer, self.scheduler), "phase": self.phase, "updates": self.updates}
            saved |= {"layout": state.layout_of(self.config), "reference": self.reference}
            torch.save(saved, root / f"rank-{self.rank}.pt")
        except (OSError, RuntimeError, CheckpointException) as error:  # torch's names for a disk that refuses
            cause = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise BackendError(f"Saving rank {self.rank} below {root} failed: {cause}. Free space there.") from error

    def load(self, directory: str) -> None:
        """Restore what `save` wrote. Raises: ConfigError when it was saved under another layout or has no reference."""
        root = Path(directory)
        saved = state.read(root / f"rank-{self.rank}.pt")
        state.check_same_layout(saved["layout"], state.layout_of(self.config), root)
        state.load_weights(root / "weights", self.chunks)
        self.begin(saved["phase"])
        state.check_reference(saved["reference"] is not None, needed=self.reference is not None, directory=root)
        state.load_rank_state(saved, self.optimizer, self.scheduler)
        self.updates, self.reference = saved["updates"], saved["reference"]

    def export(self, directory: str) -> None:
        """Write a Hugging Face checkpoint into `directory`, which exists; each rank writes its own rectangles."""
        weights.export_hf(
            Path(directory),
            self.tensors,
            self.table,
            self.topology,
            source=self.source,
            rank=self.rank,
            dtype=self.config.trainer.dtype,
        )

    def send_weights(self, spec: SyncSpec, push: Push) -> SendReport:
        """Give the engines' ranks what they need of this one, while they load. Another `spec` begins a new session."""
        if self.sender is None or self.sender[0] != spec:
            self.close()
            self.sender = spec, Sender(spec, self.rank, self.device)
        return self.sender[1].send(self.tensors, push)

    def close(self) -> None:
        """Free what outlives the process."""
        if self.sender is not None:
            self.sender[1].close()
            self.sender = None

    def pid(self) -> int:
        """Of this rank's process."""
        return os.getpid()
