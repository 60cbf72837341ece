"""Where a rank of an SGLang engine stands and which layers it holds. Facts of sglang 0.5.23."""

from dataclasses import dataclass

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.pipeline import Chunk
from megatron_rl.layouts.terms import Axis

VOCAB_PADDING = 64  # sglang.srt.layers.vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE


@dataclass(frozen=True, slots=True)
class SglangTopology:
    """One engine of pp x tp ranks, numbered as SGLang does: rank = pp_rank * tp + tp_rank.

    Of the tp ranks of a stage, `ep` groups share out the experts, and the tp / ep ranks of a group cut each of theirs.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp_attention: int = 1
    """Groups of ranks that attend to requests of their own; the tp / dp_attention ranks of one cut the attention."""
    dp_lm_head: bool = False
    """The output layer is cut within each of those groups, and not over all ranks."""
    moe_dense_tp: int | None = None
    """With 1, the dense layers of a model with experts are whole on every rank."""

    def __post_init__(self) -> None:
        whats = {"ep": "the experts are shared out over", "dp_attention": "attention is shared out over"}
        for key, what in whats.items():
            size = getattr(self, key)
            if self.tp % size:
                legal = ", ".join(str(n) for n in range(1, self.tp + 1) if self.tp % n == 0)
                raise LayoutError(
                    f"rollout.{key}={size} does not divide rollout.tp={self.tp}: {what} the ranks of the engine. Set "
                    f"rollout.{key} to one of {legal}."
                )
        if self.dp_lm_head and self.dp_attention == 1:
            raise LayoutError(
                "rollout.dp_lm_head=true with rollout.dp_attention=1 has no effect: there is one attention group. Set "
                "rollout.dp_lm_head=false, or raise rollout.dp_attention."
            )
        if self.moe_dense_tp not in (None, 1, self.tp):
            raise LayoutError(
                f"rollout.moe_dense_tp={self.moe_dense_tp} with rollout.tp={self.tp}: SGLang cuts dense layers over "
                "all ranks or not at all. Set rollout.moe_dense_tp to 1 or null."
            )

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.pp * self.tp

    def axes(self, rank: int) -> dict[str, Axis]:
        """The rank's place along the axes that terms name.

        tp: all ranks of a pipeline stage. attn_tp: the ranks of an attention group. head_tp: those that cut the output
        layer. dense_tp: those that cut a dense layer of a model with experts. ep: groups that share out the experts.
        moe_tp: the ranks of such a group, which cut one expert.
        """
        assert 0 <= rank < self.world_size, (rank, self.world_size)
        tp_rank = rank % self.tp
        attn_tp, moe_tp = self.tp // self.dp_attention, self.tp // self.ep
        tp = Axis(tp_rank, self.tp, "rollout.tp")
        attn = Axis(
            tp_rank % attn_tp, attn_tp, "rollout.tp / rollout.dp_attention" if self.dp_attention > 1 else tp.key
        )
        return {
            "tp": tp,
            "attn_tp": attn,
            "head_tp": attn if self.dp_lm_head else tp,
            "dense_tp": Axis(0, 1, "rollout.moe_dense_tp") if self.moe_dense_tp == 1 else tp,
            "ep": Axis(tp_rank // moe_tp, self.ep, "rollout.ep"),
            "moe_tp": Axis(tp_rank % moe_tp, moe_tp, "rollout.tp / rollout.ep"),
        }

    def asked(self) -> dict[str, str]:
        """Axes that the config asks for beyond tp -> what to say when they cut nothing of a model."""
        wishes = {
            "ep": (self.ep > 1, f"rollout.ep={self.ep}: the model has no experts. Set it to 1."),
            "attn_tp": (
                self.dp_attention > 1,
                f"rollout.dp_attention={self.dp_attention}: SGLang's class of this model cuts attention over all "
                "ranks. Set it to 1.",
            ),
            "head_tp": (
                self.dp_lm_head,
                "rollout.dp_lm_head=true: SGLang's class of this model cuts the output layer over all ranks, or the "
                "output layer is the embedding. Set it to false.",
            ),
            "dense_tp": (
                self.moe_dense_tp is not None,
                f"rollout.moe_dense_tp={self.moe_dense_tp}: the model has no dense layers beside layers with experts, "
                "or SGLang's class of it cuts them over all ranks. Set it to null.",
            ),
        }
        return {axis: message for axis, (is_set, message) in wishes.items() if is_set}

    def chunk(self, rank: int, num_layers: int) -> Chunk:
        """What the rank's pipeline stage holds; the last stages have one layer more when they do not divide.

        Source: sglang.srt.distributed.utils.get_pp_indices.
        """
        if self.pp > num_layers:
            raise LayoutError(
                f"An engine of {self.pp} pipeline stages with a model of {num_layers} layers: some stages would be "
                "empty. Use fewer."
            )
        stage = rank // self.tp
        each, rest = divmod(num_layers, self.pp)
        longer = max(stage - (self.pp - rest), 0)  # stages before this one with a layer more
        start = stage * each + longer
        is_last = stage == self.pp - 1
        return Chunk(
            layers=range(start, start + each + (stage >= self.pp - rest)),
            has_embedding=stage == 0,
            has_norm=is_last,
            has_mtp=False,
            has_head=is_last,
        )

    def padded_vocab(self, vocab_size: int, ranks: int) -> int:
        """Rows of an embedding or output layer over the `ranks` that cut it."""
        padded = -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        multiple = VOCAB_PADDING if padded % ranks == 0 else VOCAB_PADDING * ranks
        return -(-vocab_size // multiple) * multiple
