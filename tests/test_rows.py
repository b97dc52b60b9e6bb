"""rows_of: the addresses it claims are those of the rows, and it copies only where two strides cannot reach them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rmsnorm_ops.rows import VECTOR_BYTES, Rows, rows_of
from tests.implementations import DTYPES, assert_same_bits, random
from tests.layouts import LAYOUTS, Layout

EXAMPLES = settings.default.max_examples


def claimed(rows: Rows) -> Tensor:
    """The rows, read where ``rows`` says they are."""
    inner_rows, outer_stride, inner_stride = rows.strides
    assert rows.n_rows == 0 or inner_rows > 0
    hidden = rows.tensor.shape[-1]
    flat = torch.arange(rows.n_rows)
    outer = flat // max(1, inner_rows) if rows.facts.folded else torch.zeros_like(flat)
    inner = flat - outer * inner_rows
    start = (outer * outer_stride + inner * inner_stride) * rows.facts.align + rows.tensor.storage_offset()
    index = start[:, None] + torch.arange(hidden)
    storage = torch.empty(0, dtype=rows.tensor.dtype).set_(rows.tensor.untyped_storage())
    return storage[index]


def hold_to_the_contract(x: Tensor) -> Rows:
    rows = rows_of(x)
    assert rows.n_rows == math.prod(x.shape[:-1])
    assert_same_bits(claimed(rows), x.reshape(-1, x.shape[-1]))
    assert rows.facts.aligned_pointer == (rows.tensor.data_ptr() % VECTOR_BYTES == 0)
    assert rows.facts.align in (1, VECTOR_BYTES // x.element_size())
    assert rows.facts.align == 1 or rows.facts.aligned_pointer, "units of 16 bytes from an address that is not one"
    return rows


def is_copied(rows: Rows, x: Tensor) -> bool:
    return rows.tensor.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Views of up to six dims: steps, permutations, expansions, size-1 dims, at any element of the buffer."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    shape[-1] = draw(st.sampled_from((1, 2, 3, 8, 16)))
    offset = draw(st.integers(0, 8))
    x = random(math.prod(shape) + offset, dtype=dtype, seed=draw(st.integers(0, 99)))[offset:].view(shape)
    x = x.permute(draw(st.permutations(range(x.dim())))) if draw(st.booleans()) else x
    for dim in range(x.dim()):
        step = draw(st.sampled_from((1, 1, 1, 2)))
        start = draw(st.integers(0, x.shape[dim] - 1))
        x = x[(slice(None),) * dim + (slice(start, None, step),)]
    if x.dim() < 6 and draw(st.booleans()):
        x = x.unsqueeze(draw(st.integers(0, x.dim() - 1)))
    if draw(st.booleans()):
        x = x.expand([size if size > 1 else draw(st.integers(1, 3)) for size in x.shape])
    return x


@settings(max_examples=20 * EXAMPLES)
@given(x=views())
def test_the_addresses_claimed_are_those_of_the_rows(x: Tensor) -> None:
    rows = hold_to_the_contract(x)
    copied = is_copied(rows, x)
    if x.shape[-1] == 1 or x.stride(-1) == 1:
        assert not (copied and sum(size > 1 for size in x.shape[:-1]) <= 2), "two strides reach these rows"
    else:
        assert copied, "a kernel reads columns one element apart"


@pytest.mark.parametrize("hidden", [5, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "zero" not in layout.name], ids=str)
def test_which_layouts_are_copied(layout: Layout, dtype: torch.dtype, hidden: int) -> None:
    x = layout.make(lambda *shape: random(*shape, dtype=dtype), hidden)
    rows = hold_to_the_contract(x)
    copied = is_copied(rows, x)
    assert copied == layout.copied


@pytest.mark.parametrize(
    ("make", "aligned"),
    [
        (lambda: random(4, 64, dtype=torch.bfloat16), True),
        (lambda: random(4, 192, dtype=torch.bfloat16)[:, 64:128], True),
        (lambda: random(4, 72, dtype=torch.bfloat16)[:, :64], True),
        (lambda: random(4, 72, dtype=torch.bfloat16)[:, 4:68], False),  # rows 8 bytes off
        (lambda: random(4, 68, dtype=torch.bfloat16)[:, :64], False),  # every second row 8 bytes off
        (lambda: random(4, 65, dtype=torch.bfloat16)[:, :64], False),
        (lambda: random(1, 5, 65, dtype=torch.bfloat16)[..., :64], False),
        (lambda: random(3, 4, 72, dtype=torch.bfloat16).transpose(0, 1)[..., :64], True),
        (lambda: random(3, 4, 68, dtype=torch.bfloat16).transpose(0, 1)[..., :64], False),
        (lambda: random(3, 4, 68, dtype=torch.float32).transpose(0, 1)[..., :64], True),
    ],
)
def test_which_rows_are_known_to_be_16_byte_aligned(make: object, aligned: bool) -> None:
    x = make()
    assert (hold_to_the_contract(x).facts.align > 1) == aligned


def test_rows_of_more_than_two_gigabytes_apart() -> None:
    x = torch.empty(1, dtype=torch.bfloat16, device="meta").as_strided((3, 2, 64), (2**40, 2**33, 1))
    rows = rows_of(x)
    inner_rows, outer_stride, inner_stride = rows.strides
    assert (rows.n_rows, inner_rows, outer_stride * rows.facts.align, inner_stride * rows.facts.align) == (6, 2, 2**40, 2**33)
