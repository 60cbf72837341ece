"""What README says of the code is what the code is."""

import re
from pathlib import Path

from megatron_rl.config import load_config
from megatron_rl.models import FAMILIES

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
        load_config(command.replace("\\\n", " ").split())
