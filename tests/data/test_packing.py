import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.packing import make_batch
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.types import Sample


def samples_of(lengths, *, prompt=1):
    return [
        Sample(f"p{i}", i // 4, None, i, prompt_tokens=prompt, response_tokens=n - prompt, finish="stop", version=0)
        for i, n in enumerate(lengths)
    ]


@st.composite
def cases(draw):
    dp, mini_batches = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(2, 50), min_size=dp * mini_batches, max_size=80))
    budget = draw(st.integers(max(lengths), 200))
    return lengths, {
        "dp": dp,
        "mini_batches": mini_batches,
        "tokens_per_micro_batch": budget,
        "micro_batches_multiple": draw(st.integers(1, 3)),
    }


def tokens_of(lengths, schedule):
    """[rank][micro_batch] -> tokens"""
    return [[sum(lengths[i] for i in micro_batch) for micro_batch in rank] for rank in schedule]


@given(cases())
def test_every_sample_is_scheduled_exactly_once(case):
    lengths, sizes = case
    batch = make_batch(samples_of(lengths), **sizes)
    flat = [i for mini in batch.schedule for rank in mini for micro in rank for i in micro]
    assert sorted(flat) == list(range(len(lengths)))
    assert list(batch.samples) == samples_of(lengths)


@given(cases())
def test_shape_is_mini_batches_by_ranks_by_an_equal_count_of_micro_batches(case):
    lengths, sizes = case
    schedule = make_batch(samples_of(lengths), **sizes).schedule
    assert len(schedule) == sizes["mini_batches"]
    for mini in schedule:
        assert len(mini) == sizes["dp"]
        (count,) = {len(rank) for rank in mini}
        assert count > 0
        assert count % sizes["micro_batches_multiple"] == 0


@given(cases())
def test_no_micro_batch_exceeds_the_budget(case):
    lengths, sizes = case
    for mini in make_batch(samples_of(lengths), **sizes).schedule:
        assert max(max(rank) for rank in tokens_of(lengths, mini)) <= sizes["tokens_per_micro_batch"]


@given(cases())
def test_ranks_and_equal_positions_differ_by_at_most_the_longest_sample(case):
    lengths, sizes = case
    for mini in make_batch(samples_of(lengths), **sizes).schedule:
        tokens = tokens_of(lengths, mini)
        longest = max(lengths[i] for rank in mini for micro in rank for i in micro)
        totals = [sum(rank) for rank in tokens]
        assert max(totals) - min(totals) <= longest
        for position in zip(*tokens, strict=True):
            assert max(position) - min(position) <= longest


@given(cases())
def test_mini_batches_are_consecutive_and_differ_by_at_most_one_sample(case):
    lengths, sizes = case
    members = [
        sorted(i for rank in mini for micro in rank for i in micro)
        for mini in make_batch(samples_of(lengths), **sizes).schedule
    ]
    assert [i for mini in members for i in mini] == list(range(len(lengths)))
    assert max(map(len, members)) - min(map(len, members)) <= 1


@given(cases())
def test_a_micro_batch_is_empty_only_where_there_are_fewer_samples_than_micro_batches(case):
    lengths, sizes = case
    for mini in make_batch(samples_of(lengths), **sizes).schedule:
        micro_batches = [micro for rank in mini for micro in rank]
        if sum(map(len, micro_batches)) >= len(micro_batches):
            assert all(micro_batches)


@given(cases())
def test_the_schedule_is_a_function_of_the_samples(case):
    lengths, sizes = case
    assert make_batch(samples_of(lengths), **sizes) == make_batch(samples_of(lengths), **sizes)


def test_schedule_worked_by_hand():
    # 9 7 6 5 3 2 = 32 tokens, budget 10: 4 bins on 2 ranks.
    # Fill: {9} {7} {6} {5}, then 3 -> {5 3}, 2 -> {6 2}. Loads 9 7 8 8 -> rows (9, 8), (8, 7) dealt back and forth.
    batch = make_batch(samples_of([9, 7, 6, 5, 3, 2]), dp=2, mini_batches=1, tokens_per_micro_batch=10)
    assert batch.schedule == ((((0,), (1,)), ((2, 5), (3, 4))),)


def test_everything_is_one_micro_batch_where_it_fits():
    batch = make_batch(samples_of([4, 3, 5]), dp=1, mini_batches=1, tokens_per_micro_batch=12)
    assert batch.schedule == ((((0, 1, 2),),),)


def test_samples_of_a_full_budget_each_stand_alone():
    batch = make_batch(samples_of([8] * 4), dp=2, mini_batches=1, tokens_per_micro_batch=8)
    assert batch.schedule == ((((0,), (3,)), ((1,), (2,))),)


def test_an_empty_batch_is_refused():
    with pytest.raises(DataError, match="No samples to train on.*samples.jsonl"):
        make_batch([], dp=1, mini_batches=1, tokens_per_micro_batch=8)


def test_a_sample_without_a_response_is_named():
    with pytest.raises(DataError, match=r"Sample 1 \(prompt p1, group 0\) has no response tokens"):
        make_batch(samples_of([4, 1]), dp=1, mini_batches=1, tokens_per_micro_batch=8)


def test_a_sample_longer_than_a_micro_batch_names_the_budget_that_holds_it():
    with pytest.raises(ConfigError, match="1 [+] 8 tokens.*tokens_per_micro_batch=8.*at least 9"):
        make_batch(samples_of([4, 9]), dp=1, mini_batches=1, tokens_per_micro_batch=8)


def test_the_budget_named_is_that_of_one_context_parallel_rank():
    with pytest.raises(ConfigError, match="tokens_per_micro_batch=4 on each of 2 .*at least 5"):
        make_batch(samples_of([4, 9]), dp=1, mini_batches=1, tokens_per_micro_batch=4, cp=2)
    assert make_batch(samples_of([4, 9]), dp=1, mini_batches=1, tokens_per_micro_batch=5, cp=2).schedule == (
        (((1,), (0,)),),
    )


def test_fewer_samples_than_ranks_times_mini_batches_are_refused():
    with pytest.raises(ConfigError, match="5 samples cannot fill 2 mini-batch.* on 3 data-parallel ranks"):
        make_batch(samples_of([4] * 5), dp=3, mini_batches=2, tokens_per_micro_batch=8)


def test_ten_thousand_samples_are_packed_in_well_under_a_second():
    import random
    import time

    lengths = [random.Random(i).randint(50, 4000) for i in range(10_000)]
    start = time.process_time()
    make_batch(samples_of(lengths), dp=16, mini_batches=4, tokens_per_micro_batch=16_384)
    assert time.process_time() - start < 1.0
