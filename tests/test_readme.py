"""What README and the other pages say of the code is what the code is."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megatron_rl import main
from megatron_rl.checks import check
from megatron_rl.config import Config
from megatron_rl.config_loading import as_hydra_takes, load_config
from megatron_rl.errors import ConfigError
from megatron_rl.models import FAMILIES
from megatron_rl.run_plan import describe, plan_run
from megatron_rl.sweeps.command import run_sweep
from tests.tiny import PUBLISHED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("*/*.md"))]
CONFIGS = [path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")]
WRITTEN = {
    *(
        "config.json",
        "tokenizer.json",
        "metrics.jsonl",
        "samples.jsonl",
        "warm_start.jsonl",
        "ended.json",
        "point.json",
    ),
    *("manifest.json", "config.yaml", "prompts.jsonl"),
}
"""Files that runs and conversions write, and a user's."""
TENSORS, FILES = {"model.norm.weight"}, (".py", ".png")
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}


def test_the_loop_is_the_controllers() -> None:
    (loop,) = re.findall(r"## The loop\n.*?```python\n(.*?)```", README, flags=re.DOTALL)

    assert loop in (ROOT / "megatron_rl" / "controller.py").read_text()


def listed(directory: Path) -> set[str]:
    """What `ls` shows in a clean clone; folders end with a slash."""
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    shown = [path for path in directory.iterdir() if not path.name.startswith((".", "__"))]
    clean = [path for path in shown if not any(fnmatch(path.name, pattern) for pattern in ignored)]
    return {path.name + "/" * path.is_dir() for path in clean}


def test_the_tree_it_shows_is_the_tree() -> None:
    (tree,) = re.findall(r"## Where things are\n\n```\n(.*?)```", README, flags=re.DOTALL)
    lines = {inner: re.findall(rf"^{inner}(\S.*)", tree, flags=re.MULTILINE) for inner in ("", "  ")}
    names = {inner: [re.split("  +", line)[0].split() for line in found] for inner, found in lines.items()}

    assert {name for line in names[""] for name in line} == listed(ROOT)
    assert {name for line in names["  "] for name in line} == listed(ROOT / "megatron_rl")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_path_and_link_of_a_page_is_there(page: Path) -> None:
    """A path may leave out the folders that go without saying: `sender.py`, `transport/links.py`."""
    text = (ROOT / page).read_text()
    known = {f"/{path.relative_to(ROOT)}" for top in listed(ROOT) for path in (ROOT / top).rglob("*")}
    known |= {f"/{name}".rstrip("/") for name in listed(ROOT)}
    files = re.findall(r"(?<![\w./*$-])(?:[\w-]+/)*[\w-]+\.(?:py|sh|md|txt|lock|toml|cu|jsonl?|yaml)(?![\w*])", text)
    tops = "|".join(name[:-1] for name in listed(ROOT) if name.endswith("/"))
    folders = re.findall(rf"(?<![\w./*-])(?:{tops})/[\w/-]*(?![\w.*-])", text)
    named = {name.rstrip("/") for name in (*files, *folders) if not name.startswith("runs/")} - WRITTEN
    missing = {name for name in named if not any(path.endswith(f"/{name}") for path in known)}

    assert missing == set()
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        linked = (ROOT / page).parent / target if target else ROOT / page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.*)", linked.read_text(), flags=re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, anchor


def is_known(key: str) -> bool:
    try:
        return bool(as_hydra_takes([f"{key}=1"]))
    except ConfigError:
        return False


@pytest.mark.parametrize("page", [*PAGES, *CONFIGS, Path("launch/slurm_grpo.sh")], ids=str)
def test_every_config_key_and_file_that_a_page_names_is_known(page: Path) -> None:
    text = (ROOT / page).read_text()
    sections = "|".join(field.name for field in fields(Config) if is_dataclass(field.type))
    keys = set(re.findall(rf"(?<![\w./-])(?:{sections})\.[a-z]\w*(?:\.\w+)*(?![\w(])", text))
    unknown = {key for key in keys - TENSORS if not key.endswith(FILES) and not is_known(key)}

    assert unknown == set()
    groups = {path.parent.name: path.parent for path in (ROOT / "configs").glob("*/*.yaml")}
    for group, name in re.findall(rf"(?<![\w./])({'|'.join(groups)})=([a-z0-9]\w*)", text):
        assert (groups[group] / f"{name}.yaml").exists(), f"{group}={name}"


def test_every_command_of_the_pages_has_help() -> None:
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    tools = set(re.findall(r"(?<![\w.])tools/[\w]+(?:\.py)?(?!\w)", text)) - {"tools/gather_everything.py"}
    modules = set(re.findall(r"python -m (megatron_rl[\w.]*)", text))
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    commands = [[name] for name in sorted(tools)] + [["-m", name] for name in sorted(modules)]

    assert {"tools/plan.py", "tools/convert"} < tools and modules == {"megatron_rl.main", "megatron_rl.sweeps"}
    helped = [subprocess.Popen([sys.executable, *c, "--help"], cwd=ROOT, env=outside, **QUIET) for c in commands]
    assert [(c, process.communicate()[1]) for c, process in zip(commands, helped, strict=True) if process.wait()] == []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", text, flags=re.MULTILINE)) <= targets


def test_the_variables_of_the_cluster_page_are_those_that_the_launcher_reads() -> None:
    page, launcher, *steps = (
        (ROOT / name).read_text()
        for name in ("docs/cluster.md", "launch/slurm_grpo.sh", "launch/job_steps.py", "launch/addresses.py")
    )
    nodes = "".join(steps)
    table = re.findall(r"^\| `(MRL_\w+)` \|([^|]*)\|", page, flags=re.MULTILINE)

    read = re.findall(r"\$\{(MRL_\w+):[-+]", launcher) + re.findall(r'environ\.get\("(MRL_\w+)"', nodes)
    assert {name for name, _ in table} == set(read)
    for name, default in table:
        if default.strip().isdigit():
            in_both = f"${{{name}:-{default.strip()}}}", f'environ.get("{name}") or "{default.strip()}"'
            assert in_both[0] in launcher or in_both[1] in nodes, name
    codes = set(re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE))
    ours = {
        main.DONE,
        main.FAILED,
        main.REFUSED,
        main.STOPPED,
        main.INTERRUPTED,
        int(re.findall(r"^LOST=(\d+)", launcher, re.M)[0]),
    }
    assert codes == {str(code) for code in ours}


def test_every_family_is_in_its_table() -> None:
    (table,) = re.findall(r"## Model families\n(.*?)\n## ", README, flags=re.DOTALL)

    assert set(re.findall(r"`(\w+ForCausalLM)`", table)) == set(FAMILIES)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_command_lines_of_a_page_pass_every_check(page: Path, tmp_path: Path) -> None:
    """With one model in place of the user's."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3_30b_a3b"]))
    (tmp_path / "model.safetensors").touch()
    starts = r"(?:python -m megatron_rl\.main|launch/slurm_grpo\.sh)"
    text = (ROOT / page).read_text()
    found = [(m[1], text[m.end() :]) for m in re.finditer(rf"{starts} ((?:\\\n|[^\n`#])+)", text)]
    commands = [command for command, output in found if not output.startswith("\nrefused:")]

    assert commands or page.name in ("CONTRIBUTING.md", "design.md") or page.parent.name == "kernels"
    for line in (c for c in commands if "..." not in c and "=" in c):
        command = re.sub(r"\$SLURM_\w+", "7", line)  # of a job
        words = [
            f"model.path={tmp_path}" if w.startswith("model.path=") else w
            for w in shlex.split(command.replace("\\\n", " "))
        ]
        if "hydra/sweeper=optuna" in words:  # no dry run knows its points
            continue
        if "-m" in words:
            assert run_sweep([*words, "--dry-run"], read=load_config) == 0
        else:
            check(load_config(words))


def test_the_plan_it_shows_is_the_one_that_is_printed(tmp_path: Path) -> None:
    (shown,) = re.findall(r"\$ python tools/plan.py run [^\n]*\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3_30b_a3b"]))
    words = ["experiment=qwen3_30b_a3b_2_nodes", f"model.path={tmp_path}", "data.path=prompts.jsonl"]
    config = load_config(words)

    assert describe(config, plan_run(config)).strip() == shown.strip()
