"""Where a Megatron rank stands and which layers it holds, from the config alone. Facts of megatron-core 0.19.2."""

from dataclasses import dataclass

from megatron_rl.errors import LayoutError
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
class Chunk:
    """What one virtual pipeline chunk of a rank holds."""

    layers: range
    """Global indices."""
    has_embedding: bool
    has_head: bool
    """Final norm and output layer."""


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

    def __post_init__(self) -> None:
        self._check_grid("tp", "cp")
        self._check_grid("ep", "etp")
        if self.vpp is not None and self.pp == 1:
            raise LayoutError(
                f"parallel.vpp={self.vpp} with parallel.pp=1: virtual stages interleave real ones. "
                "Set parallel.pp to at least 2, or parallel.vpp to null."
            )
        self._stage_layers()

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

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """What the rank holds, one entry per virtual stage. Chunk c of stage p is the model's part c * pp + p."""
        stage = self.coordinates(rank).pp
        chunks = self.vpp or 1
        per_chunk = [layers // chunks for layers in self._stage_layers()]
        first = [c * sum(per_chunk) + sum(per_chunk[:stage]) for c in range(chunks)]
        return tuple(
            Chunk(
                layers=range(start, start + per_chunk[stage]),
                has_embedding=stage == 0 and c == 0,
                has_head=stage == self.pp - 1 and c == chunks - 1,
            )
            for c, start in enumerate(first)
        )

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

    def _stage_layers(self) -> list[int]:
        """Layers of each pipeline stage. Raises: LayoutError when they do not come out even."""
        ends = {"first": self.first_stage_layers, "last": self.last_stage_layers}
        given = {end: layers for end, layers in ends.items() if layers is not None}
        middle = self.pp - len(given)
        rest = self.num_layers - sum(given.values())
        if middle < 0 or rest < 0 or (rest % middle if middle else rest) or (middle and not rest):
            raise LayoutError(self._uneven(given, middle, rest))
        if self.vpp is not None and not middle:
            raise LayoutError(
                f"parallel.vpp={self.vpp} with parallel.pp=2 and both first_stage_layers and last_stage_layers: "
                "megatron-core divides by the number of stages between them, which is 0. Set one of the two to null."
            )
        layers = [rest // middle if middle else 0] * self.pp
        if "first" in given:
            layers[0] = given["first"]
        if "last" in given:
            layers[-1] = given["last"]
        if any(n % (self.vpp or 1) for n in layers):
            raise LayoutError(
                f"parallel.vpp={self.vpp} does not divide the layers of each pipeline stage, {layers}: every virtual "
                "chunk of a stage needs as many. Choose parallel.vpp (or pp, first_stage_layers, last_stage_layers) so "
                "that it does."
            )
        return layers

    def _uneven(self, given: dict[str, int], middle: int, rest: int) -> str:
        taken = "".join(f", {n} of them in the {end} stage" for end, n in given.items())
        legal = ", ".join(str(n) for n in range(1, self.num_layers + 1) if self.num_layers % n == 0)
        return (
            f"The model's {self.num_layers} layers{taken}, leave {rest} for {middle} of parallel.pp={self.pp} stages: "
            "each of those needs as many, and at least one. Set parallel.first_stage_layers and last_stage_layers so "
            f"that the rest divides, or leave both null and set parallel.pp to one of {legal}."
        )
