"""Where a rank of an SGLang engine stands. Facts of sglang 0.5.23; no data-parallel attention, no pipeline."""

from dataclasses import dataclass

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.terms import Axis

VOCAB_PADDING = 64  # sglang.srt.layers.vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE


@dataclass(frozen=True, slots=True)
class SglangTopology:
    """One engine of `tp` ranks; `ep` of them share out the experts, and tp / ep ranks cut each expert."""

    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.tp % self.ep:
            legal = ", ".join(str(n) for n in range(1, self.tp + 1) if self.tp % n == 0)
            raise LayoutError(
                f"rollout.ep={self.ep} does not divide rollout.tp={self.tp}: the experts are shared out over the "
                f"ranks of the engine. Set rollout.ep to one of {legal}."
            )

    def axes(self, rank: int) -> dict[str, Axis]:
        """The rank's place along the axes that terms name: tp, ep, moe_tp (ranks that cut one expert)."""
        assert 0 <= rank < self.tp, (rank, self.tp)
        moe_tp = self.tp // self.ep
        return {
            "tp": Axis(rank, self.tp, "rollout.tp"),
            "ep": Axis(rank // moe_tp, self.ep, "rollout.ep"),
            "moe_tp": Axis(rank % moe_tp, moe_tp, "rollout.tp / rollout.ep"),
        }

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of the embedding over all ranks."""
        padded = -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        multiple = VOCAB_PADDING if padded % self.tp == 0 else VOCAB_PADDING * self.tp
        return -(-vocab_size // multiple) * multiple
