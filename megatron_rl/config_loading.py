"""YAML files and overrides become a config; what nothing reads is refused."""

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from megatron_rl.config import Config, one_of
from megatron_rl.errors import ConfigError

_INSTALLED = Path(__file__).parent / "configs"
CONFIG_DIR = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[1] / "configs"
"""setup.py puts the clone's configs/ into the package."""


def _known_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of every field; a passthrough dict ends in ".*"."""
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(f.type):
            yield prefix + f.name
            yield from _known_keys(f.type, f"{prefix}{f.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + f.name + (".*" if f.default_factory is dict else "")


def _present_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, node):
        yield f"{prefix}{key}"
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _present_keys(child, f"{prefix}{key}.")


def unknown_key(key: str, known: Sequence[str]) -> ConfigError:
    """The error for a key that nothing reads, naming the nearest one that something does."""
    names = [k.removesuffix(".*") for k in known]

    def likeness(name: str) -> tuple[float, float]:
        leaves = difflib.SequenceMatcher(None, key.rsplit(".", 1)[-1], name.rsplit(".", 1)[-1]).ratio()
        return leaves, difflib.SequenceMatcher(None, key, name).ratio()

    ranked = sorted(names, key=likeness, reverse=True)
    best = [repr(n) for n in ranked[:3] if likeness(n)[0] == likeness(ranked[0])[0] >= 0.6]
    hint = f"Did you mean {' or '.join(best)}?" if best else f"Sections: {', '.join(_top_level(names))}."
    return ConfigError(f"Unknown config key {key!r}: nothing reads it. {hint}")


def load_config(overrides: Sequence[str], *, config_dir: Path = CONFIG_DIR) -> Config:
    """Compose configs/config.yaml with `overrides` (Hydra's key=value grammar) into a checked Config.

    Raises: ConfigError for an unknown key (also one added with "+"), a wrong type, a missing value, or a value that
    cannot work; it names the nearest key and the mend.
    """
    known, groups = list(_known_keys(Config)), _groups(config_dir)
    taken = as_hydra_takes(overrides, config_dir=config_dir)
    try:
        with initialize_config_dir(version_base=None, config_dir=str(config_dir)):
            raw = compose("config", overrides=taken)
    except (HydraException, OmegaConfBaseException) as error:
        lines = str(error).splitlines()
        text = "; ".join(lines) if lines[0].startswith("Ambiguous") else lines[0]  # a list, or a sweep
        raise ConfigError(f"The config cannot be composed: {text}") from error
    for key in _present_keys(raw):
        if not _is_known(key, known):
            raise unknown_key(key, known)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), raw))
    except MissingMandatoryValue as error:
        raise ConfigError(
            f"Config key {error.full_key!r} has no value, and there is no default. Set it, or choose an experiment: "
            f"{', '.join(groups['experiment'])}."
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}.") from error
    assert isinstance(config, Config), type(config)
    return config


def as_hydra_takes(overrides: Sequence[str], *, config_dir: Path = CONFIG_DIR) -> list[str]:
    """Overrides for Hydra's compose, which takes keys that stand in no YAML file with "++" only.

    Raises: ConfigError for a key that nothing reads and a file that is not there, naming the nearest.
    """
    known, groups = list(_known_keys(Config)), _groups(config_dir)
    taken = []
    for override in (o.lstrip("+") for o in overrides):
        key, equals, value = override.partition("=")
        if not equals or key.startswith("~"):
            raise ConfigError(f"Override {override!r} is not key=value. Write, for example, steps=100.")
        if key in groups:
            one_of(key, value, groups[key])
        elif not _is_known(key, known):
            raise unknown_key(key, known)
        taken.append(override if key in groups else f"++{override}")
    return taken


def _groups(config_dir: Path) -> dict[str, list[str]]:
    return {p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in config_dir.iterdir() if p.is_dir()}


def _top_level(names: Sequence[str]) -> list[str]:
    return [n for n in names if "." not in n]


def _is_known(key: str, known: Sequence[str]) -> bool:
    return key in known or any(k.endswith(".*") and (key == k[:-2] or key.startswith(k[:-1])) for k in known)


def to_yaml(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))
