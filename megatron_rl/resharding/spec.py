"""What both sides of a weight sync share: the spec that they compute one plan from, and what travels between them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.resharding.messages import ALIGN_BYTES, BLOCK_BYTES

BUCKET_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
"""Of a message, by device: what hides a GPU's launches. A CPU writes four times slower over what a core with another
cache has just read; with two messages of this size in turn, that cache has dropped the first."""


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
    bucket_bytes: int = BUCKET_BYTES["cpu"]
    """Of one message, at most; each side holds two."""
    direct: bool = True
    """False: the engine's parameters are not as the layout table says, and every rank of it gets every tensor of the HF
    checkpoint, for SGLang's own loader."""
    placement: Placement | None = None
    """None: all on one node, each on a device of its own."""
    delta: bool = False
    """Send what changed since the version before, where that is shorter."""
    fp8: bool = False
    """The engine keeps linears in FP8, in blocks, as `layouts/fp8.py` says; `engine_dtype` is that of the rest."""

    def __post_init__(self) -> None:
        if self.engines < 1 or self.bucket_bytes < ALIGN_BYTES:
            raise LayoutError(
                f"{self.engines} engines and messages of {self.bucket_bytes} bytes: there must be an engine, and a "
                f"message must hold {ALIGN_BYTES} bytes. Give larger numbers."
            )
        if self.delta and not self.direct:
            raise LayoutError(
                "Changes go into parameters that hold the version before, and the engine's own loader takes whole "
                "tensors only. Leave delta out."
            )
        if self.fp8 and self.bucket_bytes < BLOCK_BYTES:
            raise LayoutError(
                f"Messages of {self.bucket_bytes} bytes: an FP8 block with its scale takes {BLOCK_BYTES}, and is not "
                "cut. Give more."
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
class Push:
    """One transfer of the weights, as every rank of both sides is told of it."""

    meeting: str
    """host:port of the TCPStore where ranks find each other."""
    session: str
    """Secret name of the links; another one after a push that failed."""
    version: int
    compare: bool = False
    """Compare the engines' parameters with the trainer's, and write nothing."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """What one trainer rank did. Times in seconds."""

    pack_s: float
    check_s: float
    """Digests."""
    wait_s: float
    """For takers."""
    staging_bytes: int
    """Memory beside the weights, at most: buffers, copies, lists of changes; not what a kernel takes while it runs."""
    compared: int
    """Elements that were compared with the version before; 0 where none is known to be on the engines."""
    changed: int
    """Of those, the ones whose bits differ. Both count words of a message's smallest element."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one engine rank did."""

    received_bytes: int
    """Counted where they were taken out of a peer's memory or the network; those of the own device left out."""
    covered_bytes: int
    """Of the parameters that they brought up to date, counted there too: as many, unless only changes came."""
    needed_bytes: int
    """Of the rank's parameters, without padding and what a trainer rank on the own device holds."""
    unpack_s: float
    """With what the engine's loader takes, if it is asked."""
    check_s: float
    wait_s: float
    staging_bytes: int


def trainer_name(rank: int) -> str:
    """As errors name it."""
    return f"trainer rank {rank}"


def engine_name(spec: SyncSpec, reader: int) -> str:
    """As errors name engine rank `reader`, counted over all engines."""
    engine, rank = divmod(reader, spec.engine.world_size)
    return f"engine {engine} rank {rank}"
