import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron_rl_kernels import Delta, apply_delta, delta_boxes, prepare, reference

from megatron_rl.errors import LayoutError
from tests.kernels.views import DTYPES, bits, cuts, random, shapes


def test_what_changed_is_found_in_order_bit_by_bit() -> None:
    old = torch.tensor([[0.0, 1.0, float("nan")], [2.0, 3.0, 4.0]])
    new = torch.tensor([[-0.0, 1.0, float("nan")], [2.0, 5.0, 4.0]])

    delta = delta_boxes([new, old[1:], new[:, ::2]], [old, old[1:], old[:, ::2]])

    assert delta.counts.tolist() == [2, 0, 1]
    assert delta.indices.tolist() == [0, 4, 0]
    assert torch.equal(bits(delta.values), bits(torch.tensor([-0.0, 5.0, -0.0])))


def test_another_payload_of_a_nan_is_a_change() -> None:
    old = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    new = torch.tensor([0x7FC0, 0x7FC2], dtype=torch.int16).view(torch.bfloat16)

    assert delta_boxes([new], [old]).indices.tolist() == [1]


def test_only_the_changed_elements_are_written() -> None:
    delta = Delta(torch.tensor([1, 2]), torch.tensor([3, 0, 2], dtype=torch.int32), torch.tensor([7.0, 8.0, 9.0]))
    memory = torch.zeros(4, 4)

    apply_delta([memory[:2, :2], memory[2]], delta)

    assert memory.tolist() == [[0, 0, 0, 0], [0, 7, 0, 0], [8, 0, 9, 0], [0, 0, 0, 0]]


def test_a_delta_of_something_else_is_refused() -> None:
    delta = delta_boxes([torch.ones(2)], [torch.zeros(2)])

    with pytest.raises(LayoutError, match=r"1 tensors of torch.float32 for 2 of \['torch.float32'\]"):
        apply_delta([torch.zeros(2), torch.zeros(2)], delta)
    with pytest.raises(LayoutError, match=r"for 1 of \['torch.bfloat16'\]"):
        apply_delta([torch.zeros(2).bfloat16()], delta)
    with pytest.raises(LayoutError, match="one dtype"):
        delta_boxes([torch.ones(2)], [torch.zeros(2).bfloat16()])


@pytest.mark.interpreted
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), dtype=st.sampled_from(DTYPES), count=st.integers(1, 3), changed=st.sampled_from([0.0, 0.1, 1.0]))
def test_the_kernel_finds_and_applies_what_the_reference_does(
    data: st.DataObject, dtype: torch.dtype, count: int, changed: float
) -> None:
    from megatron_rl_kernels.triton_ops import delta_boxes as kernel

    torch.manual_seed(0)
    pairs = []
    for _ in range(count):
        shape = data.draw(shapes.filter(lambda s: len(s) < 4))
        (memory, old), (_, new) = data.draw(cuts(shape)).view(dtype), data.draw(cuts(shape)).view(dtype)
        old.copy_(random(shape, dtype))
        new.copy_(torch.where(torch.rand(shape) < changed, bits(random(shape, dtype)), bits(old)).view(dtype))
        pairs.append((memory, old, new))
    news, olds = [new for _, _, new in pairs], [old for _, old, _ in pairs]

    delta = kernel.prepare(news, olds)()
    want = reference.delta_boxes(news, olds)
    apply = kernel.prepare_apply(olds)
    before = [memory.clone() for memory, _, _ in pairs]
    apply(delta)

    _assert_same(delta, want)
    for (memory, old, new), was in zip(pairs, before, strict=True):
        assert torch.equal(bits(old), bits(new))
        old.copy_(random(tuple(old.shape), dtype).fill_(0))
        restored = was.view(dtype).as_strided(old.shape, old.stride(), old.storage_offset())
        restored.fill_(0)
        assert torch.equal(memory, was)  # around the view


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int64])
def test_the_kernel_keeps_the_order_over_many_tiles(dtype: torch.dtype) -> None:
    from megatron_rl_kernels.triton_ops import delta_boxes as kernel

    torch.manual_seed(0)
    old = [random((3, 4096), dtype), random((5000,), dtype), random((0, 4), dtype)]
    new = [
        torch.where(torch.rand(t.shape) < 0.01, bits(random(tuple(t.shape), dtype)), bits(t)).view(dtype) for t in old
    ]

    delta = kernel.prepare(new, old)()

    _assert_same(delta, reference.delta_boxes(new, old))
    assert delta.counts[2] == 0 and delta.counts[:2].min() > 20
    kernel.prepare_apply(old)(delta)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(old, new, strict=True))


def test_a_prepared_apply_takes_each_versions_delta() -> None:
    old = [torch.zeros(3), torch.zeros(2, 2)]
    apply = prepare(apply_delta, old)

    for version in (1.0, 2.0):
        new = [t + version for t in old]
        apply(delta_boxes(new, old))

    assert old[0].tolist() == [3.0, 3.0, 3.0] and old[1].tolist() == [[3.0, 3.0], [3.0, 3.0]]


def _assert_same(found: Delta, want: Delta) -> None:
    assert torch.equal(found.counts, want.counts)
    assert torch.equal(found.indices, want.indices) and found.indices.dtype == torch.int32
    assert torch.equal(bits(found.values), bits(want.values)) and found.values.dtype == want.values.dtype
