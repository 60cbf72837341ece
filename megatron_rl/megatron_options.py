"""Names in trainer.megatron, checked against megatron-core's source text: importing it takes seconds."""

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from megatron_rl.config import ParallelConfig
from megatron_rl.errors import BackendError

_PARALLEL = {
    "tensor_model_parallel_size": "parallel.tp",
    "sequence_parallel": "parallel.sp",
    "pipeline_model_parallel_size": "parallel.pp",
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "num_layers_in_first_pipeline_stage": "parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "parallel.last_stage_layers",
    "account_for_embedding_in_pipeline_split": "parallel.account_for_embedding",
    "account_for_loss_in_pipeline_split": "parallel.account_for_loss",
    "pipeline_model_parallel_layout": "parallel.pipeline_layout",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
}
_PRECISION = ("params_dtype", "pipeline_dtype", "bf16")
FIXED = (
    "activation_func",
    "hidden_dropout",
    "attention_dropout",
    "calculate_per_token_loss",
    "perform_initialization",
    "moe_token_dispatcher_type",
    "window_size",
    "softmax_type",
    "layernorm_zero_centered_gamma",
)
"""Set by the trainer itself (trainer/build.py), whatever the config."""
_SOURCES = ("model_parallel_config.py", "transformer/transformer_config.py")


def set_elsewhere(model: Iterable[str], parallel: ParallelConfig) -> dict[str, str]:
    """Fields that trainer.megatron may not set -> what sets them. model: fields that follow from the architecture."""
    return {
        **dict.fromkeys(model, "the model's config.json"),
        **dict.fromkeys(FIXED, "the trainer itself, which needs its value"),
        **_PARALLEL,
        **dict.fromkeys(_PRECISION, "trainer.dtype"),
        # See trainer/build.py: interleaved chunks need one value.
        **(dict.fromkeys(("overlap_p2p_comm", "batch_p2p_comm"), "parallel.vpp") if parallel.vpp is not None else {}),
    }


def wrong_options(options: Iterable[str], taken: Mapping[str, str], *, mla: bool) -> Iterator[str]:
    """One message for each name that megatron's config does not have, or that something else sets (`taken`).

    Args: mla takes the fields of latent attention too.
    Raises: BackendError when megatron-core is not installed.
    """
    options = list(options)
    known = field_names(mla=mla) if options else ()
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Remove it."
            yield f"trainer.megatron.{name}: megatron-core's config of this model has no such field. {hint}"
        elif name in taken:
            yield (
                f"trainer.megatron.{name} is already set by {taken[name]}: two values cannot both hold. "
                f"Remove trainer.megatron.{name}."
            )


def field_names(*, mla: bool) -> tuple[str, ...]:
    """Fields of megatron-core's TransformerConfig (MLATransformerConfig with `mla`), its bases' among them."""
    package = importlib.util.find_spec("megatron")  # a namespace: nothing of it is imported
    places = [] if package is None else [Path(p, "core") for p in package.submodule_search_locations or ()]
    core = next((p for p in places if (p / _SOURCES[0]).is_file()), None)
    if core is None:
        raise BackendError("megatron-core is not installed in this environment. Run `make` to set it up.")
    classes = {"ModelParallelConfig", "TransformerConfig", *(["MLATransformerConfig"] if mla else [])}
    return tuple(
        statement.target.id
        for source in _SOURCES
        for node in ast.parse((core / source).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )
