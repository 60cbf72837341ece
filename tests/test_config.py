import ast
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.config import Config
from megatron_rl.config_loading import CONFIG_DIR, load_config, to_yaml
from megatron_rl.errors import ConfigError

DEMO = "experiment=cpu_digits"


def test_an_override_reaches_its_field_with_its_type() -> None:
    config = load_config([DEMO, "algorithm.lr=3e-5", "parallel.vpp=2", "trainer.megatron.recompute_granularity=full"])

    assert config.algorithm.lr == 3e-5
    assert config.parallel.vpp == 2
    assert config.trainer.megatron == {"recompute_granularity": "full"}


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algorithm.lrr=1", "algorithm.lr"),
        ("+algorithm.lrr=1", "algorithm.lr"),
        ("++trainer.tpp=2", "parallel.tp"),
        ("sampling.max_token=3", "sampling.max_tokens"),
        ("prompts_per_stp=3", "prompts_per_step"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(override: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"nothing reads it\. Did you mean .*'{nearest}'"):
        load_config([DEMO, override])


def test_an_unknown_key_in_a_yaml_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "config.yaml").write_text("defaults: [_self_]\nname: x\nalgorithm: {lr: 1.0, clip_hihg: 0.3}\n")

    with pytest.raises(
        ConfigError, match=r"'algorithm.clip_hihg': nothing reads it\. Did you mean 'algorithm.clip_high'"
    ):
        load_config([], config_dir=tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=abc", "steps: Value 'abc'"),
        ("steps=1.5", "steps: Value '1.5'"),
        ("steps=null", "steps: Incompatible value 'None'"),
        ("parallel.tp=0", "parallel.tp=0 must be at least 1"),
        ("sampling.temperature=0", "greedy samples have no group spread"),
        ("trainer.dtype=bf16", "Did you mean 'bfloat16'"),
        ("mode=trian", "Did you mean 'train'"),
        ("experiment=cpu_digit", "Did you mean 'cpu_digits'"),
        ("model.path=/x", "exactly one says where the weights come from"),
        ("mode=train_only", "replays a file named by samples=PATH"),
        ("data.path=null", "data.source=jsonl needs data.path"),
        ("name=a/b", "names a directory"),
        ("sft.decay=liner", "sft.decay='liner'.*Did you mean 'linear'"),
        ("cluster.address=here", "cluster.address='here' is no address of a Ray cluster.*HOST:PORT"),
        ("cluster.address=host:99999", "cluster.address='host:99999' is no address"),
        ("sft.steps=-1", "sft.steps=-1 must be at least 0"),
        ("algorithm.importance_cap=0.5", "algorithm.importance_cap=0.5 must be at least 1"),
        ("algorithm.clip_grad=-1", "algorithm.clip_grad=-1.0 must be at least 0"),
        ("evaluation.samples_per_prompt=0", "evaluation.samples_per_prompt=0 must be at least 1"),
        ("trainer.threads_per_rank=0", "trainer.threads_per_rank=0 must be at least 1"),
        ("algorithm.lr=nan", "algorithm.lr=nan is no finite number"),
        ("sampling.temperature=inf", "sampling.temperature=inf is no finite number"),
        ("reward.threshold=nan", "reward.threshold=nan is no finite number"),
        ("trainer.step_timeout_s=0", "trainer.step_timeout_s=0.0 leaves no time"),
        ("rollout.request_timeout_s=-5", "rollout.request_timeout_s=-5.0 leaves no time"),
        ("seed=-1", "seed=-1: the libraries that it seeds take 0 to"),
        ("data.seed=99999999999999999999", "data.seed=9+: the libraries that it seeds take 0 to"),
        ("algorithm.beta1=1", "algorithm.beta1=1.0 must be at least 0 and below 1"),
        ("sft.beta2=-0.5", "sft.beta2=-0.5 must be at least 0 and below 1"),
        ("algorithm.eps=0", "algorithm.eps=0.0 must be above 0"),
        ("algorithm.clip_low=1.5", "algorithm.clip_low=1.5 is above 1"),
        ("cluster.address=''", "cluster.address='' is no address"),
        ("steps", "is not key=value"),
        ("~sft", "is not key=value"),
        ("name=[1,", "cannot be composed"),
    ],
)
def test_a_wrong_value_is_refused_with_the_mend(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([DEMO, override])


def test_no_number_may_be_infinite_or_none_and_no_deadline_over() -> None:
    """Every field, so that a new one is not forgotten."""
    config = load_config([DEMO])
    floats = [key for key, kind in number_fields(Config) if "float" in str(kind)]
    assert len(floats) > 20

    for key in floats:
        for value in (math.nan, math.inf, *((0.0,) if key.endswith("timeout_s") else ())):
            with pytest.raises(ConfigError, match=f"{key}={value}"):
                changed(config, key, value)


def changed(section: Any, key: str, value: float) -> Any:
    name, _, rest = key.partition(".")
    return dataclasses.replace(section, **{name: changed(getattr(section, name), rest, value) if rest else value})


def number_fields(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(f.type):
            yield from number_fields(f.type, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f.type


def test_a_schedule_that_goes_up_is_refused_with_both_rates() -> None:
    message = "algorithm.min_lr=1.0 is above algorithm.lr=0.5: the schedule only goes down"

    with pytest.raises(ConfigError, match=message):
        load_config([DEMO, "algorithm.lr=0.5", "algorithm.min_lr=1"])


def test_a_missing_value_is_named() -> None:
    with pytest.raises(ConfigError, match="'name' has no value.*cpu_digits"):
        load_config([])


def test_the_written_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_config([DEMO, "parallel.tp=2", "seed=7"])
    written = yaml.safe_load(to_yaml(config))

    assert written == dataclasses.asdict(config)


@pytest.mark.parametrize("address", ["null", "auto", "10.0.0.1:6379", "'[::1]:6379'", "ray://head:10001"])
def test_an_address_that_ray_knows_is_taken(address: str) -> None:
    load_config([DEMO, f"cluster.address={address}"])


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_no_ranks_on_a_node_is_no_layout(role: str) -> None:
    with pytest.raises(ConfigError, match=f"{role}.ranks_per_node=0 must be at least 1"):
        load_config(["experiment=cpu_digits", f"{role}.ranks_per_node=0"])


def leaves(section: type) -> Iterator[str]:
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(field.type):
            yield from leaves(field.type)
        else:
            yield field.name


def test_every_key_is_read_by_the_program() -> None:
    """By its last name, outside the schema: a key that nothing reads would do nothing."""
    package = CONFIG_DIR.parent / "megatron_rl"
    files = [path for path in package.rglob("*.py") if path.name != "config.py"]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}

    assert len(files) > 50
    assert {name for name in leaves(Config) if name not in read} == set()
