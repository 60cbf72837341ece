"""Each term on one rank, worked by hand."""

import pytest

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.terms import (
    Axis,
    Cols,
    Concat,
    HfTensor,
    Local,
    PadVocab,
    PerGroup,
    Piece,
    Place,
    Rep,
    Rows,
    local,
)

WIDE = HfTensor("wide", (12, 7))


def at(rank: int, size: int, term: Piece, *, padded_vocab: int = 0) -> Local:
    return local(term, Place({"tp": Axis(rank, size, "parallel.tp")}, lambda *_: padded_vocab))


def spans(piece: Local) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(r.tensor.name, r.offset, r.shape) for r in piece.rectangles]


def test_rep_is_the_whole_tensor() -> None:
    assert spans(at(1, 3, Rep(WIDE))) == [("wide", (0, 0), (12, 7))]


def test_rows_and_cols_are_equal_shares() -> None:
    assert spans(at(1, 3, Rows(WIDE, "tp", unit=2))) == [("wide", (4, 0), (4, 7))]
    assert spans(at(2, 7, Cols(WIDE, "tp"))) == [("wide", (0, 2), (12, 1))]


def test_repeated_blocks_go_to_neighbouring_ranks() -> None:
    # 2 heads of 6 rows over 4 ranks.
    term = Rows(WIDE, "tp", unit=6, repeat=True)
    assert [at(rank, 4, term).rectangles[0].offset[0] for rank in range(4)] == [0, 0, 6, 6]


def test_groups_are_interleaved_then_cut() -> None:
    # 2 groups: q has 4 rows of each group, k and v 1. Rank 1 of 2 holds the second group.
    q, k, v = HfTensor("q", (8, 5)), HfTensor("k", (2, 5)), HfTensor("v", (2, 5))
    piece = at(1, 2, PerGroup((q, k, v), 2, "tp"))
    assert spans(piece) == [("q", (4, 0), (4, 5)), ("k", (1, 0), (1, 5)), ("v", (1, 0), (1, 5))]
    assert piece.shape == (6, 5)
    # 4 ranks of 3 rows: the second one has the end of the first group.
    assert spans(at(1, 4, PerGroup((q, k, v), 2, "tp"))) == [
        ("q", (3, 0), (1, 5)),
        ("k", (0, 0), (1, 5)),
        ("v", (0, 0), (1, 5)),
    ]
    both = at(0, 1, PerGroup((q, k, v), 2, "tp"))
    assert [r.tensor.name for r in both.rectangles] == ["q", "k", "v", "q", "k", "v"]


def test_concat_stacks_the_shares_of_its_parts() -> None:
    tall = HfTensor("tall", (6, 7))
    piece = at(1, 2, Concat((Rows(WIDE, "tp"), Rep(tall))))
    assert spans(piece) == [("wide", (6, 0), (6, 7)), ("tall", (0, 0), (6, 7))]
    assert piece.shape == (12, 7)


def test_padding_rows_have_no_source() -> None:
    # 12 rows padded to 20 over 4 ranks of 5: 5, 5, 2, none.
    pieces = [at(rank, 4, PadVocab(WIDE, "tp"), padded_vocab=20) for rank in range(4)]
    assert [piece.shape for piece in pieces] == [(5, 7)] * 4
    assert [spans(piece) for piece in pieces[2:]] == [[("wide", (10, 0), (2, 7))], []]


def test_blocks_stay_whole() -> None:
    with pytest.raises(LayoutError, match=r"parallel.tp=4 does not divide wide \(blocks of 4 rows\).* one of 1, 3\."):
        at(0, 4, Rows(WIDE, "tp", unit=4))
