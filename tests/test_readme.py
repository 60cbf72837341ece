"""What README says of the code is what the code is."""

import json
import re
import shlex
from pathlib import Path

from megatron_rl.config import load_config
from megatron_rl.models import FAMILIES
from megatron_rl.run_plan import describe, plan_run
from megatron_rl.sweeps.command import run_sweep
from tests.tiny import PUBLISHED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_loop_is_the_controllers() -> None:
    (loop,) = re.findall(r"## The loop\n.*?```python\n(.*?)```", README, flags=re.DOTALL)

    assert loop in (ROOT / "megatron_rl" / "controller.py").read_text()


def test_every_place_it_names_exists() -> None:
    (table,) = re.findall(r"## Where things are\n(.*?)\n\nOne table", README, flags=re.DOTALL)
    first_columns = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for column in first_columns for name in re.findall(r"`([^`]+)`", column)]

    assert len(names) > 20
    missing = [n for n in names if not any((root / n).exists() for root in (ROOT, ROOT / "megatron_rl"))]
    assert missing == []


def test_every_family_is_in_its_table() -> None:
    (table,) = re.findall(r"## Model families\n(.*?)\n## ", README, flags=re.DOTALL)

    assert set(re.findall(r"`(\w+ForCausalLM)`", table)) == set(FAMILIES)


def test_its_command_lines_are_accepted() -> None:
    commands = re.findall(r"python -m megatron_rl\.main ((?:\\\n|[^\n`])+)", README)

    assert len(commands) >= 1
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))
        if "-m" in words:
            assert run_sweep([*words, "--dry-run"], read=load_config) == 0
        else:
            load_config(words)


def test_the_plan_it_shows_is_the_one_that_is_printed(tmp_path: Path) -> None:
    (shown,) = re.findall(r"\$ python tools/plan.py run [^\n]*\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3_30b_a3b"]))
    words = ["experiment=qwen3_30b_a3b_2_nodes", f"model.path={tmp_path}", "data.path=prompts.jsonl"]
    config = load_config(words)

    assert describe(config, plan_run(config)).strip() == shown.strip()
