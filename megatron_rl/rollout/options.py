"""The command line of an SGLang server: our settings, and the user's own options, checked by name."""

import ast
import difflib
import importlib.util
import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from megatron_rl.errors import BackendError, ConfigError
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.layouts.fp8 import CONFIG
from megatron_rl.rollout.sglang_cpu.settings import CPU_FLAGS

LOADER = "megatron_rl.rollout.receiver.load"
"""The custom weight loader, as SGLang knows it."""

SET_ELSEWHERE = {
    "model_path": "model.path",
    "tp_size": "rollout.tp",
    "ep_size": "rollout.ep",
    "attn_dp_size": "rollout.dp_attention",
    "enable_dp_attention": "rollout.dp_attention",
    "enable_dp_lm_head": "rollout.dp_lm_head",
    "moe_dense_tp_size": "rollout.moe_dense_tp",
    "dtype": "rollout.dtype",
    "max_total_tokens": "rollout.max_total_tokens",
    "max_running_requests": "rollout.max_running_requests",
    "nnodes": "rollout.ranks_per_node",
}
OURS = (
    *("host", "port", "node_rank", "dist_init_addr"),
    *("custom_weight_loader", "weight_version", "skip_tokenizer_init", "device"),
    *("disable_shared_experts_fusion", "enforce_shared_experts_fusion"),
)
"""Set by `command` for every server; another value would break it."""
SET_BY_FP8 = ("quantization", "load_format", "json_model_override_args")
_NO_TABLE = "the weight sync knows engines cut by rollout.tp, ep and dp_attention only"
UNSUPPORTED = {
    "pp_size": _NO_TABLE,
    "dp_size": f"{_NO_TABLE}; for more servers raise rollout.engines",
    "attn_cp_size": _NO_TABLE,
    "moe_dp_size": _NO_TABLE,
    "dwdp_size": _NO_TABLE,
}
"""Accepted by SGLang, and the first weight update would fail. Each with the reason."""
STREAMED = {
    "quantization": "the engine keeps other numbers than the trainer's",
    "moe_runner_backend": "some of them keep the experts' rows in another order",
    "moe_a2a_backend": "it keeps the shared experts whole on every rank",
    "enable_eplb": "it moves experts between ranks",
    "init_expert_location": "it places experts on other ranks",
    "ep_num_redundant_experts": "it keeps some experts twice",
}
"""With these the engine's parameters are not as the layout tables say, and SGLang's own loader has to take the weights.
Each with the reason."""
AS_EVER = {"moe_runner_backend": "triton", "moe_a2a_backend": "none", "init_expert_location": "trivial"}
"""Values that change nothing."""
FP8_FLAGS: dict[str, Any] = {
    "json-model-override-args": {"quantization_config": CONFIG},
    # The checkpoint is not in FP8: the first push brings all weights.
    "load-format": "dummy",
}
"""Of a server with `rollout.fp8`."""
_SHORT = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "attention_data_parallel_size": "attn_dp_size",
    "attention_context_parallel_size": "attn_cp_size",
    "moe_data_parallel_size": "moe_dp_size",
}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One server."""

    name: str
    """Of its process and log file: engine-0."""
    model_path: str
    """Hugging Face checkpoint it starts from."""
    log_path: str
    device: str
    """`cpu` or "cuda"."""
    tp: int = 1
    ep: int = 1
    dp_attention: int = 1
    dp_lm_head: bool = False
    moe_dense_tp: int | None = None
    dtype: str = "bfloat16"
    max_total_tokens: int = 16_384
    max_running_requests: int = 256
    start_timeout_s: float = 240.0
    request_timeout_s: float = 1800.0
    port: int | None = None
    """None takes a free one."""
    nodes: int = 1
    """That the ranks lie on, as many on each. Every node runs a part of the server."""
    part: int = 0
    """Which part this is; the first answers requests."""
    fp8: bool = False
    sglang: Mapping[str, Any] = field(default_factory=dict)
    """The user's own options."""

    @property
    def title(self) -> str:
        """The name in errors: with this node's, where other nodes run other parts."""
        return f"{self.name} on {socket.gethostname()}" if self.nodes > 1 else self.name


def check_sglang_options(options: Mapping[str, Any], *, direct: Iterable[str] = (), fp8: bool = False) -> None:
    """Raises: ConfigError for an option that SGLang does not have, or that is set elsewhere. Reads source text only.

    direct: config keys that are set and want the engines' parameters to be as the layout tables say. fp8: whether
    `rollout.fp8` is set.
    """
    known = _option_names()
    for key in options:
        name = _full_name(key)
        if name in SET_ELSEWHERE:
            raise ConfigError(
                f"rollout.sglang.{key} is set by {SET_ELSEWHERE[name]}. Set that one, and leave this out."
            )
        if name in OURS:
            raise ConfigError(f"rollout.sglang.{key} is set by the rollout itself: weight sync needs it. Leave it out.")
        if name in UNSUPPORTED:
            raise ConfigError(f"rollout.sglang.{key} does not work here: {UNSUPPORTED[name]}. Leave it out.")
        if fp8 and name in SET_BY_FP8:
            raise ConfigError(f"rollout.sglang.{key} with rollout.fp8=true, which sets it. Leave one of them out.")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"rollout.sglang.{key}: sglang.launch_server has no such option.{hint}")
    for key, name in product(streamed(options), direct):
        raise ConfigError(
            f"rollout.sglang.{key} with {name}=true: SGLang's own loader then makes something else of the weights, "
            f"which can neither be compared with the trainer's nor be changed in parts. Set {name}=false, or leave the "
            "option out."
        )


def streamed(options: Mapping[str, Any]) -> dict[str, str]:
    """Those of the user's options for which SGLang's own loader has to take the weights, each with the reason."""
    asked = {key: (_full_name(key), value) for key, value in options.items() if value}
    return {
        key: STREAMED[name] for key, (name, value) in asked.items() if name in STREAMED and AS_EVER.get(name) != value
    }


def why_streamed(options: Mapping[str, Any], tensors: Iterable[TensorLayout], *, ranks: int) -> str:
    """For the log: why weights take that way, and what it costs."""
    why = "; ".join(f"rollout.sglang.{key}: {reason}" for key, reason in streamed(options).items())
    return (
        f"weights go through SGLang's own loader ({why}): each of {ranks} engine rank(s) receives the whole model, "
        f"{sum(tensor.nbytes for tensor in tensors) / 1e9:.3f} GB, and not its own part only"
    )


def _full_name(key: str) -> str:
    return _SHORT.get(key.replace("-", "_"), key.replace("-", "_"))


def _option_names() -> tuple[str, ...]:
    """Names of SGLang's server arguments, without importing it, which takes seconds."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise BackendError("sglang is not installed in this environment. Run `make` to set it up.")
    path = Path(package.submodule_search_locations[0]) / "srt" / "arg_groups" / "field_order.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            return tuple(ast.literal_eval(node.value))
    raise BackendError(f"{path} does not list SGLang's options: another version than the pinned one is installed.")


def command(settings: ServerSettings, *, port: int, meeting: str | None = None) -> list[str]:
    """Arguments of sglang.launch_server. `meeting`: host:port where the parts of one server find each other."""
    flags: dict[str, Any] = {
        "model-path": settings.model_path,
        "host": "127.0.0.1",  # requests come from the server's own actor
        "port": port,
        "tp-size": settings.tp,
        "ep-size": settings.ep,
        "attn-dp-size": settings.dp_attention,
        "enable-dp-lm-head": settings.dp_lm_head,
        "moe-dense-tp-size": settings.moe_dense_tp,
        "dtype": settings.dtype,
        "max-total-tokens": settings.max_total_tokens,
        "max-running-requests": settings.max_running_requests,
        "custom-weight-loader": LOADER,
        "weight-version": "0",
        # Fused, the shared experts would lie in slots behind the routed ones, which the layout tables do not have.
        "disable-shared-experts-fusion": True,
        # Tokens in, tokens out.
        "skip-tokenizer-init": True,
        "log-level": "info",
        "log-level-http": "warning",
    }
    if settings.nodes > 1:
        flags |= {"nnodes": settings.nodes, "node-rank": settings.part, "dist-init-addr": meeting}
    # Left to itself, SGLang may take kernels that want up before gate, in tensors of the same shapes.
    flags |= CPU_FLAGS if settings.device == "cpu" else {"moe-runner-backend": "triton"}
    flags |= FP8_FLAGS if settings.fp8 else {}
    flags |= {key.replace("_", "-"): value for key, value in settings.sglang.items()}
    return [word for name, value in flags.items() for word in _words(name, value)]


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable with which SGLang, which asks its own server whether it is up, does not ask a proxy for it."""
    known = environment.get("no_proxy") or environment.get("NO_PROXY")
    return {"no_proxy": f"{known},127.0.0.1" if known else "127.0.0.1"}


def _words(name: str, value: object) -> Iterator[str]:
    if value is None or value is False:
        return
    yield f"--{name}"
    if value is not True:
        values = value if isinstance(value, list | tuple) else [value]
        yield from (json.dumps(v) if isinstance(v, dict) else str(v) for v in values)
