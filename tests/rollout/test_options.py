"""The server's command line."""

import json
import socket

import pytest
import torch
from requests.utils import get_environ_proxies

from megatron_rl.errors import ConfigError, LayoutError
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.rollout.options import (
    LOADER,
    ServerSettings,
    check_sglang_options,
    command,
    streamed,
    why_streamed,
    without_proxy,
)
from megatron_rl.rollout.receiver import __name__ as receiver_module
from megatron_rl.rollout.receiver import weights_of


def settings(**values: object) -> ServerSettings:
    base = {"name": "engine-0", "model_path": "/m", "log_path": "/l", "device": "cpu"}
    return ServerSettings(**{**base, **values})  # type: ignore[arg-type]


def test_the_loader_is_where_the_command_line_says() -> None:
    assert f"{receiver_module}.load" == LOADER


def test_options_of_sglang_pass_in_either_spelling() -> None:
    check_sglang_options({"chunked_prefill_size": 64, "mem-fraction-static": 0.5})


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="chunked_prefil_size.*Did you mean 'chunked_prefill_size'"):
        check_sglang_options({"chunked_prefil_size": 64})


def test_an_option_that_has_a_key_of_its_own_names_it() -> None:
    with pytest.raises(ConfigError, match="rollout.sglang.tp is set by rollout.tp"):
        check_sglang_options({"tp": 2})
    with pytest.raises(ConfigError, match="rollout.sglang.nnodes is set by rollout.ranks_per_node"):
        check_sglang_options({"nnodes": 2})


def test_an_option_that_weight_sync_needs_is_refused() -> None:
    with pytest.raises(ConfigError, match="custom-weight-loader"):
        check_sglang_options({"custom-weight-loader": "x"})


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("pp_size", "cut by rollout.tp, ep and dp_attention only"),
        ("pipeline-parallel-size", "cut by rollout.tp, ep and dp_attention only"),
        ("dp", "raise rollout.engines"),
    ],
)
def test_what_a_weight_update_would_fail_with_is_refused_with_the_reason(option: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.sglang.{option} does not work here: .*{reason}.*Leave it out"):
        check_sglang_options({option: 2})


def test_options_that_change_the_engines_parameters_have_sglangs_own_loader_take_the_weights() -> None:
    options = {"quantization": "fp8", "ep-num-redundant-experts": 2, "enable_eplb": False, "chunked_prefill_size": 64}
    check_sglang_options(options)

    assert list(streamed(options)) == ["quantization", "ep-num-redundant-experts"]
    assert not streamed({"chunked_prefill_size": 64, "moe_runner_backend": "triton", "moe-a2a-backend": "none"})
    tensors = [TensorLayout("a", (1000, 400), "bfloat16", ()), TensorLayout("b", (50_000,), "float32", ())]
    assert why_streamed(options, tensors, ranks=6) == (
        "weights go through SGLang's own loader (rollout.sglang.quantization: the engine keeps other numbers than the "
        "trainer's; rollout.sglang.ep-num-redundant-experts: it keeps some experts twice): each of 6 engine rank(s) "
        "receives the whole model, 0.001 GB, and not its own part only"
    )


def test_parameters_that_sglangs_own_loader_made_are_neither_verified_nor_changed_in_parts() -> None:
    check_sglang_options({"chunked_prefill_size": 64}, direct=["weights.verify"])
    with pytest.raises(ConfigError, match="rollout.sglang.enable-eplb with weights.delta=true.*weights.delta=false"):
        check_sglang_options({"enable-eplb": True}, direct=["weights.delta"])


def test_fp8_begins_without_weights_and_is_set_by_its_own_key() -> None:
    words = command(settings(fp8=True, device="cuda"), port=5)
    assert words[words.index("--load-format") + 1] == "dummy"
    override = json.loads(words[words.index("--json-model-override-args") + 1])
    assert override["quantization_config"]["weight_block_size"] == [128, 128]
    assert "--load-format" not in command(settings(device="cuda"), port=5)

    check_sglang_options({"fp8_gemm_runner_backend": "triton"}, fp8=True)
    for option in ("quantization", "load-format", "json_model_override_args"):
        with pytest.raises(ConfigError, match=f"rollout.sglang.{option} with rollout.fp8=true"):
            check_sglang_options({option: "x"}, fp8=True)


def test_weights_in_fp8_are_taken_without_the_kv_caches_scales_and_not_repacked() -> None:
    model = torch.nn.Module()
    for name, value in (("weight", 3.0), ("weight_scale_inv", 2.0), ("k_scale", 5.0), ("v_scale", 7.0)):
        model.register_parameter(name, torch.nn.Parameter(torch.tensor([value]), requires_grad=False))
    layer = torch.nn.ModuleDict({"attn": model})
    assert list(weights_of(layer)) == ["attn.weight", "attn.weight_scale_inv"]
    assert [model.k_scale.item(), model.v_scale.item()] == [1.0, 1.0]

    model.weight_scale_inv = torch.nn.Parameter(torch.zeros(4, 1, dtype=torch.int32), requires_grad=False)
    with pytest.raises(LayoutError, match=r"attn.weight_scale_inv as \[4, 1\] torch.int32.*fp8_gemm_runner_backend"):
        weights_of(layer)


def test_a_mapping_is_passed_as_json() -> None:
    words = command(settings(sglang={"json_model_override_args": {"rope_theta": 1.5, "a": [None, True]}}), port=5)

    assert words[-2:] == ["--json-model-override-args", '{"rope_theta": 1.5, "a": [null, true]}']


def test_true_is_a_bare_flag_false_is_absent_and_a_list_is_many_words() -> None:
    words = command(settings(sglang={"enable_metrics": True, "log_requests": False, "cuda_graph_bs": [1, 2]}), port=5)

    assert words[-4:] == ["--enable-metrics", "--cuda-graph-bs", "1", "2"]
    assert "--log-requests" not in words


def test_a_gpu_runs_experts_by_the_kernels_whose_layout_the_tables_have() -> None:
    assert "--moe-runner-backend triton" in " ".join(command(settings(device="cuda"), port=5))
    assert "--moe-runner-backend" not in command(settings(device="cpu"), port=5)


def test_cpu_flags_are_given_only_without_a_gpu() -> None:
    assert "torch_native" in command(settings(device="cpu"), port=5)
    assert "torch_native" not in command(settings(device="cuda"), port=5)


def test_the_cut_of_an_engine_reaches_the_server() -> None:
    words = " ".join(command(settings(tp=4, ep=2, dp_attention=2, dp_lm_head=True, moe_dense_tp=1), port=5))
    for flags in ("--tp-size 4", "--ep-size 2", "--attn-dp-size 2", "--enable-dp-lm-head", "--moe-dense-tp-size 1"):
        assert flags in words


@pytest.mark.parametrize("known", [{}, {"NO_PROXY": "a.example"}, {"no_proxy": "a.example", "NO_PROXY": "not-this"}])
def test_a_server_asks_no_proxy_for_itself(known: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"http_proxy": "http://192.0.2.1:3128"} | known | without_proxy(known)).items():
        monkeypatch.setenv(name, value)

    assert not get_environ_proxies("http://127.0.0.1:5/model_info")
    assert get_environ_proxies("http://b.example/")["http"] == "http://192.0.2.1:3128"
    assert bool(get_environ_proxies("http://a.example/")) == (not known)


def test_a_part_of_a_server_is_told_which_it_is_and_where_the_others_meet_it() -> None:
    part = settings(name="engine-0-part-1", tp=4, nodes=2, part=1)

    words = " ".join(command(part, port=5, meeting="10.0.0.1:7"))

    assert "--tp-size 4" in words
    assert "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:7" in words
    assert "--nnodes" not in command(settings(), port=5)
    assert part.title == f"engine-0-part-1 on {socket.gethostname()}"
    assert settings().title == "engine-0"
