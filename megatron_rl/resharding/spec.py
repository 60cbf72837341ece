"""What both sides of a weight sync share: the spec that they compute one plan from, and what travels between them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.layouts.compile import megatron_ranks, sglang_ranks
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.models import load_table
from megatron_rl.resharding.messages import ALIGN_BYTES
from megatron_rl.resharding.plan import Copy, make_plan, plan_hash


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every rank stands, as (node, device of the node). Ranks of both sides may share a device."""

    trainers: tuple[tuple[int, int], ...]
    """One for each trainer rank."""
    engines: tuple[tuple[int, int], ...]
    """One for each rank of each engine, engine after engine."""


@dataclass(frozen=True, slots=True)
class SyncSpec:
    """All that both sides need to compute the same plan."""

    hf_config: dict[str, Any]
    trainer: MegatronTopology
    engine: SglangTopology
    """Of each of the engines."""
    trainer_dtype: str
    engine_dtype: str
    engines: int = 1
    bucket_bytes: int = 64 << 20
    """Of one message, at most; each side holds two."""
    placement: Placement | None = None
    """None: all on one node, each on a device of its own."""

    def __post_init__(self) -> None:
        if self.engines < 1 or self.bucket_bytes < ALIGN_BYTES:
            raise LayoutError(
                f"{self.engines} engines and messages of {self.bucket_bytes} bytes: there must be an engine, and a "
                f"message must hold {ALIGN_BYTES} bytes. Give larger numbers."
            )
        placed, ranks = self.placed(), (self.trainer.world_size, self.readers)
        if (len(placed.trainers), len(placed.engines)) != ranks:
            raise LayoutError(
                f"The placement names {len(placed.trainers)} trainer ranks and {len(placed.engines)} engine ranks, "
                f"where there are {ranks[0]} and {ranks[1]}: some would stand nowhere. Name each once."
            )

    @property
    def readers(self) -> int:
        """Ranks of all engines."""
        return self.engines * self.engine.world_size

    def placed(self) -> Placement:
        """Where every rank stands."""
        if self.placement is not None:
            return self.placement
        ours, theirs = self.trainer.world_size, self.readers
        return Placement(tuple((0, d) for d in range(ours)), tuple((0, ours + d) for d in range(theirs)))

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "SyncSpec":
        """What `to_json` wrote."""
        parts = {"trainer": MegatronTopology(**value["trainer"]), "engine": SglangTopology(**value["engine"])}
        placement = value["placement"] and Placement(
            **{side: tuple((node, device) for node, device in places) for side, places in value["placement"].items()}
        )
        return cls(**{**value, **parts, "placement": placement})


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The copies of one spec, and the layouts they lie between."""

    sources: dict[int, tuple[TensorLayout, ...]]
    destinations: dict[int, tuple[TensorLayout, ...]]
    copies: tuple[Copy, ...]
    hash: str


def compile_sync(spec: SyncSpec) -> SyncPlan:
    """Layouts of every rank of both sides, and the plan between them."""
    table = load_table(spec.hf_config)
    sources = megatron_ranks(table, spec.trainer, dtype=spec.trainer_dtype)
    destinations = sglang_ranks(table, spec.engine, dtype=spec.engine_dtype)
    copies = make_plan(sources, destinations)
    return SyncPlan(sources, destinations, copies, plan_hash(copies))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where one trainer rank's part of one engine rank's weights lies."""

    src_rank: int
    dst_rank: int
    path: str
    nbytes: int
    plan_hash: str
    """Of the plan it was packed by."""
    digest: str
    """xxh3-128 of the bucket."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one engine rank did with one version of the weights."""

    received_bytes: int
    needed_bytes: int
    """Of the rank's parameters, padding left out."""
