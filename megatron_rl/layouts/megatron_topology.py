"""Where a Megatron rank stands and which layers it holds, from the config alone. Facts of megatron-core 0.19.2."""

from dataclasses import dataclass

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.pipeline import Chunk, Pipeline
from megatron_rl.layouts.terms import Axis

VOCAB_MULTIPLE = 8  # rows of the embedding on each rank: a multiple of this, which tensor cores want


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place. The ranks of a pipeline stage form two grids: (dp, cp, tp) and, for experts, (edp, ep, etp)."""

    pp: int
    dp: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True)
class MegatronTopology:
    """How a model is cut over Megatron's ranks. Order of ranks: tp-cp-ep-dp-pp, Megatron's default."""

    world_size: int
    num_layers: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    pipeline_layout: str | None = None
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        self._check_grid("tp", "cp")
        self._check_grid("ep", "etp")
        self._pipeline().parts()

    @property
    def dp(self) -> int:
        """Data-parallel size of everything but the experts."""
        return self.world_size // (self.pp * self.cp * self.tp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world_size // (self.pp * self.ep * self.etp)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        assert 0 <= rank < self.world_size, (rank, self.world_size)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        rest, etp = divmod(rank, self.etp)
        rest, ep = divmod(rest, self.ep)
        return Coordinates(pp=pp, dp=dp, cp=cp, tp=tp, edp=rest % self.edp, ep=ep, etp=etp)

    def axes(self, rank: int) -> dict[str, Axis]:
        """The rank's place along the axes that terms name."""
        at = self.coordinates(rank)
        return {
            "tp": Axis(at.tp, self.tp, "parallel.tp"),
            "ep": Axis(at.ep, self.ep, "parallel.ep"),
            "etp": Axis(at.etp, self.etp, "parallel.etp"),
        }

    def asked(self) -> dict[str, str]:
        """Axes that the config asks for and that only experts have -> what to say to a model without."""
        sizes = {"ep": self.ep, "etp": self.etp}
        return {k: f"parallel.{k}={n}: the model has no experts. Set it to 1." for k, n in sizes.items() if n > 1}

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """What the rank holds, one entry per virtual stage."""
        return self._pipeline().parts()[self.coordinates(rank).pp :: self.pp]

    def stage_layers(self) -> list[str]:
        """The decoder layers of each pipeline stage, chunk after chunk: ["0-2, 6-8", "3-5, 9-11"]."""
        held = [self.chunks(stage * self.world_size // self.pp) for stage in range(self.pp)]
        return [", ".join(f"{c.layers.start}-{c.layers.stop - 1}" for c in s if c.layers) or "none" for s in held]

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks; those past `vocab_size` are never exported."""
        multiple = VOCAB_MULTIPLE * self.tp
        return -(-vocab_size // multiple) * multiple

    def _check_grid(self, *names: str) -> None:
        sizes = {f"parallel.{name}": getattr(self, name) for name in (*names, "pp")}
        ranks = 1
        for size in sizes.values():
            ranks *= size
        if self.world_size % ranks:
            product = " x ".join(f"{key}={size}" for key, size in sizes.items())
            raise LayoutError(
                f"trainer.world_size={self.world_size} is not a multiple of {product} = {ranks}: some ranks would have "
                f"no place. Set trainer.world_size to a multiple of {ranks}, or make one of the sizes smaller."
            )

    def _pipeline(self) -> Pipeline:
        return Pipeline(
            num_layers=self.num_layers,
            mtp_layers=self.mtp_layers,
            pp=self.pp,
            vpp=self.vpp,
            first_stage_layers=self.first_stage_layers,
            last_stage_layers=self.last_stage_layers,
            account_for_embedding=self.account_for_embedding,
            account_for_loss=self.account_for_loss,
            layout=self.pipeline_layout,
        )
