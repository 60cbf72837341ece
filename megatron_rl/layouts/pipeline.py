"""Which layers each part of a pipeline holds. Facts of megatron-core 0.19.2.

A pipeline of `pp` stages with `vpp` chunks each has pp * vpp parts, in the order in which a token passes through them:
chunk c of stage p is part c * pp + p.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from megatron_rl.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one virtual pipeline chunk of a rank holds."""

    layers: range
    """Global indices of decoder layers; may be empty."""
    has_embedding: bool
    """Of the first chunk; the chunk of the MTP layers has a copy."""
    has_norm: bool
    """Final norm: with the output layer, or with the last decoder layer when there are MTP layers."""
    has_mtp: bool
    """All multi-token prediction layers."""
    has_head: bool
    """Output layer."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the layers of a model are cut. The fields are config keys: see `ParallelConfig`."""

    num_layers: int
    mtp_layers: int
    pp: int
    vpp: int | None
    first_stage_layers: int | None
    last_stage_layers: int | None
    account_for_embedding: bool
    account_for_loss: bool
    layout: str | None

    def parts(self) -> tuple[Chunk, ...]:
        """Every part, in order. Raises: LayoutError for a cut that megatron-core cannot make or that drops a layer."""
        self._check_switches()
        if self.layout is None:
            layers = self._counts()
            mtp = len(layers) - 1
        else:
            rows = _unroll(self.layout)
            self._check_layout(rows)
            layers = [row.count("t") for row in rows]
            mtp = next((i for i, row in enumerate(rows) if "m" in row), -1)
        ends = list(accumulate(layers))
        norm = ends.index(self.num_layers) if self.mtp_layers else len(layers) - 1
        return tuple(
            Chunk(
                layers=range(end - count, end),
                has_embedding=i == 0 or (i == mtp and self.mtp_layers > 0),
                has_norm=i == norm,
                has_mtp=i == mtp and self.mtp_layers > 0,
                has_head=i == len(layers) - 1,
            )
            for i, (end, count) in enumerate(zip(ends, layers, strict=True))
        )

    def _check_switches(self) -> None:
        """Refuse what megatron-core refuses to combine, and what would have no effect."""
        if self.vpp is not None and self.pp == 1:
            raise LayoutError(
                f"parallel.vpp={self.vpp} with parallel.pp=1: virtual stages interleave real ones. "
                "Set parallel.pp to at least 2, or parallel.vpp to null."
            )
        accounts = {name: getattr(self, name) for name in ("account_for_embedding", "account_for_loss")}
        sizes = {name: getattr(self, name) for name in ("first_stage_layers", "last_stage_layers")}
        accounted = [f"parallel.{name}=true" for name, value in accounts.items() if value]
        sized = [f"parallel.{name}={value}" for name, value in sizes.items() if value is not None]
        drawn = [] if self.layout is None else [f"parallel.pipeline_layout={self.layout!r}"]
        ways = [way for way in (sized, accounted, drawn) if way]
        if len(ways) > 1:
            raise LayoutError(
                f"{' and '.join(', '.join(way) for way in ways)}: each alone says how layers are cut, and "
                "megatron-core takes one of them. Keep one."
            )
        if self.pp == 1 and (accounted or drawn):
            raise LayoutError(
                f"{', '.join(accounted or drawn)} with parallel.pp=1 has no effect: there is one stage. Remove it, or "
                "raise parallel.pp."
            )

    def _counts(self) -> list[int]:
        """Decoder layers of each part, without a layout string."""
        chunks = self.vpp or 1
        stages = self._even_stages() if self.account_for_embedding or self.account_for_loss else self._stages()
        if any(n % chunks for n in stages):
            raise LayoutError(
                f"parallel.vpp={self.vpp} does not divide the layers of each pipeline stage, {stages}: every virtual "
                "chunk of a stage needs as many. Choose parallel.vpp (or pp, first_stage_layers, last_stage_layers) so "
                "that it does, or write parallel.pipeline_layout."
            )
        counts = [n // chunks for n in stages] * chunks
        counts[0] -= self.account_for_embedding
        counts[-1] -= self.account_for_loss
        return counts

    def _even_stages(self) -> list[int]:
        """Layers of each stage, embedding and loss counted as one each where the config says so."""
        extra = self.account_for_embedding + self.account_for_loss
        if (self.num_layers + extra) % self.pp:
            raise LayoutError(
                f"The model's {self.num_layers} layers and {extra} for parallel.account_for_embedding and "
                f"account_for_loss are {self.num_layers + extra}, which parallel.pp={self.pp} does not divide: every "
                "stage needs as many. Change one of the three, or write parallel.pipeline_layout."
            )
        return [(self.num_layers + extra) // self.pp] * self.pp

    def _stages(self) -> list[int]:
        """Layers of each stage, the first and last one's given or not."""
        ends = {"first": self.first_stage_layers, "last": self.last_stage_layers}
        given = {end: layers for end, layers in ends.items() if layers is not None}
        middle = self.pp - len(given)
        rest = self.num_layers - sum(given.values())
        empty = min(given.values(), default=1) < 1
        if empty or middle < 0 or rest < 0 or (rest % middle if middle else rest) or (middle and not rest):
            raise LayoutError(self._uneven(given, middle, rest))
        if self.vpp is not None and not middle:
            raise LayoutError(
                f"parallel.vpp={self.vpp} with parallel.pp=2 and both first_stage_layers and last_stage_layers: "
                "megatron-core divides by the number of stages between them, which is 0. Set one of the two to null."
            )
        layers = [rest // middle if middle else 0] * self.pp
        if "first" in given:
            layers[0] = given["first"]
        if "last" in given:
            layers[-1] = given["last"]
        return layers

    def _uneven(self, given: dict[str, int], middle: int, rest: int) -> str:
        taken = "".join(f", {n} of them in the {end} stage" for end, n in given.items())
        legal = ", ".join(str(n) for n in range(1, self.num_layers + 1) if self.num_layers % n == 0)
        return (
            f"The model's {self.num_layers} layers{taken}, leave {rest} for {middle} of parallel.pp={self.pp} stages: "
            "each of those needs as many, and at least one. Set parallel.first_stage_layers and last_stage_layers so "
            f"that the rest divides, or leave both null and set parallel.pp to one of {legal}."
        )

    def _check_layout(self, rows: list[str]) -> None:
        """Refuse a layout string that does not hold this model, each layer once."""
        for problem in self._wrong(rows):
            raise LayoutError(f"parallel.pipeline_layout={self.layout!r} {problem}")

    def _wrong(self, rows: list[str]) -> Iterator[str]:
        text = "".join(rows)
        if unknown := set(text) - set("EtmL"):
            yield (
                f"has {', '.join(map(repr, sorted(unknown)))}: known are E (embedding), t (decoder layer), m "
                "(multi-token prediction layer), L (output layer and loss), | between parts, and *n after one of these "
                "or a group in parentheses. Write it with those."
            )
        parts = self.pp * (self.vpp or 1)
        if len(rows) != parts:
            vpp = len(rows) // self.pp
            mend = f"Set parallel.vpp={'null' if vpp == 1 else vpp}" if len(rows) % self.pp == 0 else "Write as many"
            yield (
                f"has {len(rows)} parts, and parallel.pp={self.pp} with parallel.vpp={self.vpp or 'null'} needs "
                f"{parts}: one for each virtual chunk of each stage. {mend}."
            )
        for letter, wanted, key in (("t", self.num_layers, "decoder"), ("m", self.mtp_layers, "prediction (MTP)")):
            if (count := text.count(letter)) != wanted:
                yield (
                    f"places {count} {key} layers, the model has {wanted}: some would be on no rank or on a missing "
                    f"one. Write {wanted} {letter}."
                )
        if not re.fullmatch("Et*m*L", text) or "E" not in rows[0] or "L" not in rows[-1]:
            yield (
                "must begin its first part with the only E and end its last one with the only L, with every m behind "
                "every t: megatron-core puts the embedding into the first part and the output layer into the last one, "
                "whatever the string says. Reorder it."
            )
        with_mtp = [i for i, row in enumerate(rows) if "m" in row]
        if with_mtp and (len(with_mtp) > 1 or with_mtp[0] < parts - self.pp):
            yield (
                "spreads its m over several parts, or has them in another than the last virtual chunk of a stage: "
                "megatron-core builds all of them there. Move them."
            )


def _unroll(layout: str) -> list[str]:
    """The letters of each part. megatron-core's grammar: (...)*n, then x*n; commas are for the eye."""
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        text = re.sub(repeated, lambda m: m[1] * int(m[2]), text)
    return text.split("|")
