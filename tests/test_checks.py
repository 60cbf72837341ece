import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.checks import check, longest_demonstration, longest_prompt
from megatron_rl.config import Config
from megatron_rl.config_loading import load_config
from megatron_rl.errors import ConfigError
from tests.tiny import TINY


def demo(*overrides: str) -> Config:
    return load_config(["experiment=cpu_digits", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.world_size=3"], "trainer.world_size=3 is not a multiple of parallel.ep=2.*multiple of 2"),
        (["parallel.pp=2"], "trainer.world_size=2 is not a multiple of.*4"),
        (["parallel.pp=2", "trainer.world_size=4"], "3 layers.*parallel.pp to one of 1, 3"),
        (["parallel.tp=2"], "refuses experts under tensor parallelism without sequence parallelism"),
        (["parallel.sp=true"], "parallel.sp=true with parallel.tp=1 has no effect"),
        (["parallel.vpp=3"], "parallel.vpp=3 with parallel.pp=1"),
        (["parallel.ep=3", "trainer.world_size=3"], "parallel.ep=3 does not divide the experts.*1, 2, 4, 8"),
        (["rollout.fp8=true"], "rollout.fp8=true with rollout.dtype=float32"),
        (["rollout.fp8=true", "rollout.dtype=bfloat16"], r"rollout.fp8=true: .* blocks of 128 x 128.*Set it to false"),
        (
            ["rollout.fp8=true", "rollout.dtype=bfloat16", "mode=rollout_only"],
            "rollout.fp8=true with mode=rollout_only.*Set rollout.fp8=false",
        ),
        (["rollout.tp=3"], "rollout.tp=3 does not divide.*one of 1, 2, 4"),
        (["rollout.ep=2"], "rollout.ep=2 does not divide rollout.tp=1"),
        (["model=hf", "model.path=/nowhere"], "/nowhere has no readable config.json.*model.path"),
        (["model.random.architectures=[OPTForCausalLM]"], "'OPTForCausalLM'.*Known: DeepseekV3"),
        (["model.random.hidden_size=abc"], "hidden_size='abc': a size is a whole number of at least 1"),
        (["model.random.hidden_size=64.5"], "hidden_size=64.5: a size is a whole number"),
        (["model.random.num_hidden_layers=2.5"], "num_hidden_layers=2.5: a size is a whole number"),
        (["model.random.num_hidden_layers=true"], "num_hidden_layers=True: a size is a whole number"),
        (["model.random.kv_lora_rank=-4"], "kv_lora_rank=-4: a size is a whole number of at least 1"),
        (["model.random.vocab_size=0"], "vocab_size=0: a size is a whole number of at least 1"),
        (["model.random.first_k_dense_replace=-1"], "first_k_dense_replace=-1: a size is a whole number of at least 0"),
        (["++model.random.num_nextn_predict_layers=0.5"], "num_nextn_predict_layers=0.5: a size is a whole number"),
        (["model.random.routed_scaling_factor=-1"], "routed_scaling_factor=-1, where a number above 0 has to be"),
        (["model.random.rope_theta=abc"], "rope_theta='abc', where a number above 0 has to be"),
        (["model.random.rope_scaling=3"], "scales positions by 3, which is no object"),
        (["model.random.rope_scaling.factor=-4"], "factor of rope_scaling=-4, where a number above 0"),
        (["model.random.rope_scaling.mscale=x"], "mscale of rope_scaling='x', where a number above 0"),
        (["model.random.num_hidden_layers=null"], "has no 'num_hidden_layers'"),
        (["model.random.rms_norm_eps=x"], "rms_norm_eps='x', where a number above 0 has to be"),
        (["model.random.topk_group=3"], "scores a group by its best 1 experts"),
        (["sampling.samples_per_prompt=1"], "a group baseline needs at least 2"),
        (["sampling.max_tokens=512"], "leaves no room for a prompt in the model's context of 512"),
        (["sampling.max_tokens=4096"], "a whole sample has to fit one micro-batch"),
        (["rollout.max_total_tokens=8"], "does not hold one answer"),
        (["reward.name=verifier"], "only reasoning_gym's tasks bring their own verifier"),
        (["reward.name=exct"], "reward.name='exct' is not one of exact"),
        (["mode=train_only", "samples=/nowhere.jsonl"], "samples=/nowhere.jsonl is not a file"),
        (["mode=sft"], "Set sft.steps=0"),
        (["algorithm.mini_batches=300", "steps=1"], "256 samples cannot fill algorithm.mini_batches=300"),
        (["sft.prompts_per_step=1"], "less than the 2 data-parallel ranks"),
        (["trainer.megatron.moe_aux_los_coeff=1"], "trainer.megatron.moe_aux_los_coeff.*Did you mean 'moe_aux_loss_"),
        (["trainer.megatron.hidden_size=1"], "hidden_size is already set by the model's config.json.*Remove"),
        (["trainer.megatron.expert_model_parallel_size=1"], "already set by parallel.ep"),
        (["trainer.megatron.bf16=true"], "already set by trainer.dtype"),
        (["trainer.megatron.hidden_dropout=0.1"], "already set by the trainer itself"),
        (["data.task=chain_sum"], "data.task=chain_sum with data.source=jsonl has no effect.*Remove"),
        (["data.task_options={a: 1}"], "data.task_options=.* with data.source=jsonl has no effect"),
        (["data.source=reasoning_gym", "data.task=chain_sum"], "data.path=.* has no effect.*data.path=null"),
        (["data.held_out=0", "evaluation.every=50"], "evaluation.every=50 with data.held_out=0.*evaluation.every=0"),
        (
            ["algorithm.mini_batches=1", "algorithm.clip_high=0.3"],
            "clip_high=0.3 with algorithm.mini_batches=1 has no",
        ),
        (["cluster.address=a:1", "cluster.cpus=9"], "cluster.cpus=9 with cluster.address=a:1 has no effect"),
        (["cluster.cpus=3"], "cluster.cpus=3 is less than the 4 that the processes need.*Set it to 4"),
        (["sft.lr=0", "sft.min_lr=0"], "sft.lr=0 with 110 supervised updates: nothing would be learned"),
        (["sft.steps=5"], "sft.warmup_steps=20 of 5 optimizer steps"),
    ],
)
def test_what_cannot_work_is_refused_with_the_mend(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(demo(*overrides))


def test_a_micro_batch_is_shared_out_over_context_parallel_ranks() -> None:
    sizes = ["trainer.tokens_per_micro_batch=8", "sampling.max_tokens=12", "trainer.world_size=2", "parallel.ep=1"]

    check(demo(*sizes, "parallel.cp=2"))
    with pytest.raises(ConfigError, match="a whole sample has to fit one micro-batch"):
        check(demo(*sizes))


@pytest.mark.parametrize(
    ("mode", "overrides", "cpus"),
    [
        ("train", ["rollout.tp=2", "rollout.engines=3"], 2 + 6 + 1),
        ("sft", ["sft.steps=0"], 2),
        ("rollout_only", ["rollout.tp=2", "rollout.engines=3"], 6 + 1),
        ("train_only", [f"samples={__file__}"], 2),
    ],
)
def test_each_mode_works_with_the_cpus_of_what_it_starts(mode: str, overrides: list[str], cpus: int) -> None:
    check(demo(f"mode={mode}", *overrides, f"cluster.cpus={cpus}"))
    with pytest.raises(ConfigError, match=f"less than the {cpus} "):
        check(demo(f"mode={mode}", *overrides, f"cluster.cpus={cpus - 1}"))


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ([], 512),
        (["trainer.tokens_per_micro_batch=100", "parallel.cp=2", "parallel.ep=1"], 200),
        (["mode=sft", "sft.steps=0"], 512),
        (["sft.steps=0"], None),
        (["mode=rollout_only"], None),
    ],
)
def test_a_demonstration_fits_context_and_micro_batch_where_there_are_any(
    overrides: list[str], tokens: int | None
) -> None:
    assert longest_demonstration(demo(*overrides), context=512) == tokens


SFT = ["name=x", "steps=5", "model=hf", "data.source=jsonl", "data.path=x.jsonl", "sft.lr=1e-5"]


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        (["mode=train_only", "samples=x"], 1024 - 8),
        ([], 1024 - 10),
        (["sampling.max_tokens=1"], 1024 - 7),
        (["rollout.max_total_tokens=300"], 300 - 10),
        (["trainer.tokens_per_micro_batch=200"], 200 - 8),
    ],
)
def test_the_longest_prompt_leaves_what_the_engine_keeps_for_itself(overrides: list[str], longest: int) -> None:
    some = demo("sampling.max_tokens=8", "trainer.tokens_per_micro_batch=4096", *overrides)

    assert longest_prompt(some, context=1024) == longest


def test_supervised_training_asks_for_nothing_that_it_does_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY["llama"], "vocab_size": 61}))
    (tmp_path / "model.safetensors").touch()
    words = [*SFT, f"model.path={tmp_path}"]

    check(load_config([*words, "mode=sft"]))
    with pytest.raises(ConfigError) as caught:
        check(load_config(words))
    for key in ("needs prompts_per_step,", "needs sampling.max_tokens,", "reward.name='' is not one of exact"):
        assert key in str(caught.value)


def test_what_only_supervised_updates_read_does_not_stop_a_run_without() -> None:
    check(demo("sft.steps=0", "sft.prompts_per_step=1", "sft.lr=0", "sft.min_lr=0"))
    check(demo("sft.steps=0", "mode=sft", "algorithm.warmup_steps=900"))


def test_an_engine_that_is_not_there_limits_nothing() -> None:
    check(demo("rollout.max_total_tokens=8", "mode=sft", "sft.steps=0"))


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check(demo("sampling.samples_per_prompt=1", "rollout.ep=2", "trainer.world_size=5"))

    assert str(caught.value).count("\n  - ") == 3


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "holds a list"), ("{}", "'\\(none\\)'")])
def test_a_broken_config_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError, match=message):
        check(demo("model=hf", f"model.path={tmp_path}"))


def test_a_model_without_experts_has_none_to_share_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY["llama"], "vocab_size": 61}))

    with pytest.raises(
        ConfigError, match="(?s)parallel.ep=2: the model has no experts.*rollout.ep=2: the model has no experts"
    ):
        check(demo("model=hf", f"model.path={tmp_path}", "rollout.tp=2", "rollout.ep=2"))


def test_the_sizes_of_a_checkpoint_are_checked_as_those_of_a_random_model(tmp_path: Path) -> None:
    hf: dict[str, Any] = {**demo().model.random, "vocab_size": 99, "num_attention_heads": 6}
    (tmp_path / "config.json").write_text(json.dumps(hf))

    with pytest.raises(ConfigError, match="rollout.tp=4 does not divide.*one of 1, 2, 3, 6"):
        check(demo("model=hf", f"model.path={tmp_path}", "rollout.tp=4"))


CLUSTER = "cluster.address=head:6379"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.ranks_per_node=3", CLUSTER], "trainer.ranks_per_node=3 does not share out 2 ranks.*one of 1, 2, or"),
        (
            ["rollout.tp=4", "rollout.engines=3", "rollout.ranks_per_node=3", CLUSTER],
            "ranks_per_node=3 does not share out 12 ranks in .* groups of 4 evenly.*one of 1, 2, 4, 12, or to null",
        ),
        (["rollout.tp=4", "rollout.engines=3", "rollout.ranks_per_node=6", CLUSTER], "ranks_per_node=6 does not share"),
        (["trainer.ranks_per_node=1"], "trainer.ranks_per_node=1 with cluster.address=null.*it needs 2 nodes"),
        (["rollout.tp=2", "rollout.ranks_per_node=1"], "rollout.ranks_per_node=1 with cluster.address=null.*2 nodes"),
        (["cluster.trainer_nodes=big"], "cluster.trainer_nodes=big with cluster.address=null.*no node offers it"),
        (["cluster.rollout_nodes=big"], "cluster.rollout_nodes=big with cluster.address=null.*no node offers it"),
    ],
)
def test_ranks_that_cannot_be_shared_out_over_nodes_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(demo(*overrides))


def test_an_engine_may_lie_on_several_nodes_of_a_cluster() -> None:
    check(demo("rollout.tp=4", "rollout.engines=2", "rollout.ranks_per_node=2", "trainer.ranks_per_node=1", CLUSTER))
    check(demo("trainer.ranks_per_node=2"))  # all on one node, as anywhere
    check(demo("mode=sft", "sft.steps=0", "rollout.ranks_per_node=5"))  # nobody is there to be placed
