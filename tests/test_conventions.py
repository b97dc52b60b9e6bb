"""Where y is rounded, to the bit: once (torch's convention), or before the weight too (Llama's in Hugging Face)."""

import math

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn import functional as F

from tests.implementations import CPU, DEVICES, TRITON, Implementation, assert_same_bits, bits, random

HALVES = (torch.float16, torch.bfloat16)


def require_rounding(operator: Implementation, dtype: torch.dtype) -> None:
    if not operator.rounds_to_nearest(dtype):
        pytest.skip("needs a GPU: Triton's interpreter truncates where it stores bf16")


def rounded_once(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    return (x.float() * rstd * weight.float()).to(x.dtype)


def gemma(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    return (x.float() * rstd * (1.0 + weight.float())).to(x.dtype)


def llama(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    return weight * (x.float() * rstd).to(x.dtype)


CONVENTIONS = {
    "once": (rounded_once, {}),
    "gemma": (gemma, {"weight_offset": 1.0}),
    "llama": (llama, {"round_before_weight": True}),
}


def sure(convention: object, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y, and where it is the same for every rstd within 2 ulp: no rounding hangs on the last bit of the mean."""
    exact = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
    low, high = (convention(x, weight, (exact * (1 + side * 2.0**-22)).float()) for side in (-1, 1))
    return low, bits(low) == bits(high)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", CONVENTIONS)
def test_bitwise(operator: Implementation, name: str, dtype: torch.dtype) -> None:
    require_rounding(operator, dtype)
    x, weight = random(16, 1024, dtype=dtype), random(1024, dtype=dtype, seed=1)
    convention, options = CONVENTIONS[name]
    expected, agreed = sure(convention, x, weight, 1e-6)
    assert agreed.float().mean() > 0.99
    y = operator.forward(x.to(operator.device), weight.to(operator.device), 1e-6, **options).cpu()
    assert_same_bits(y[agreed], expected[agreed])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_conventions_differ(dtype: torch.dtype) -> None:
    """Else the test above could not tell them apart."""
    x, weight = random(16, 1024, dtype=dtype), random(1024, dtype=dtype, seed=1)
    (once, sure_once), (twice, sure_twice) = sure(rounded_once, x, weight, 1e-6), sure(llama, x, weight, 1e-6)
    differ = (bits(once) != bits(twice)) & sure_once & sure_twice
    assert differ.float().mean() > 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_default_is_what_torch_does(dtype: torch.dtype, device: str) -> None:
    x, weight = random(16, 1024, dtype=dtype, device=device), random(1024, dtype=dtype, device=device, seed=1)
    _, agreed = sure(rounded_once, x, weight, 1e-6)
    theirs = F.rms_norm(x, (1024,), weight, 1e-6)
    ours = (CPU if device == "cpu" else TRITON).forward(x, weight, 1e-6)
    assert_same_bits(ours[agreed], theirs[agreed])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("options", [{}, {"round_before_weight": True}], ids=["once", "twice"])
def test_an_exact_mean_square_leaves_one_right_answer(operator: Implementation, options: dict, dtype: torch.dtype) -> None:
    """Rows of small integers whose squares sum to hidden · 4⁶, in any order: rstd is 2⁻⁶, and y = x · weight / 64 rounded."""
    require_rounding(operator, dtype)
    x = torch.stack([integers_with_mean_square(4**6, 128, seed) for seed in range(8)]).to(dtype)
    weight = random(128, dtype=dtype)
    y = operator.forward(x.to(operator.device), weight.to(operator.device), 0.0, **options).cpu()
    assert_same_bits(y, (x.double() / 64 * weight.double()).to(dtype))


def integers_with_mean_square(mean: int, hidden: int, seed: int) -> Tensor:
    """Signed integers below 256. The last four make up what the others leave: any integer is a sum of four squares."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-104, 105, (hidden,), generator=generator)
    rest = mean * hidden - int(x[:-4].square().sum())
    assert rest > 0
    x[-4:] = torch.tensor(four_squares(rest))
    assert int(x.square().sum()) == mean * hidden
    assert int(x.abs().max()) < 256
    return x


def four_squares(total: int) -> list[int]:
    for a in range(min(255, math.isqrt(total)), 0, -1):
        for b in range(min(a, math.isqrt(total - a * a)), -1, -1):
            left = total - a * a - b * b
            for c in range(math.isqrt(left // 2), -1, -1):
                d = math.isqrt(left - c * c)
                if c * c + d * d == left and d < 256:
                    return [a, b, c, d]
    raise AssertionError(total)


GOLDEN_DTYPES = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16))


def golden(operator: Implementation) -> str:
    x = torch.tensor([1.0, -2.0, 3.0, -0.5, 0.375, 7.0, 100.0, -0.0625])
    weight = torch.tensor([1.0, 1.1, -0.9, 3.3, 0.7, 1.9, 0.013, 250.0])
    lines = []
    for dtype, weight_dtype in GOLDEN_DTYPES:
        for name, (_, options) in CONVENTIONS.items():
            if operator.rounds_to_nearest(dtype):
                y = operator.forward(
                    x.to(dtype).to(operator.device), weight.to(weight_dtype).to(operator.device), 1e-5, **options
                )
                codes = " ".join(f"{code & 0xFFFF:04x}" for code in bits(y).tolist())
                lines.append(f"{str(dtype)[6:]:8} {str(weight_dtype)[6:]:8} {name:5} {codes}")
    return "\n".join(lines)


def test_golden_bits() -> None:
    """As they were when written: a change of convention must be on purpose."""
    assert_expected_inline(
        golden(CPU),
        """\
bfloat16 bfloat16 once  3ce7 bd7e bd9c bd3e 3bf2 3ec0 3d16 bee2
bfloat16 bfloat16 gemma 3d67 bdf3 3c0d bd78 3c93 3f12 4037 bee2
bfloat16 bfloat16 llama 3ce7 bd7e bd9b bd3e 3bf2 3ec0 3d16 bee2
bfloat16 float32  once  3ce7 bd7e bd9c bd3f 3bf3 3ec0 3d16 bee2
bfloat16 float32  gemma 3d67 bdf3 3c0b bd78 3c93 3f13 4037 bee2
bfloat16 float32  llama 3ce7 bd7e bd9c bd3f 3bf2 3ec0 3d16 bee2
float16  float16  once  2738 abf0 acdf a9f5 1f95 3600 28b1 b70c
float16  float16  gemma 2b38 af94 2056 abc3 249a 3894 41b6 b714
float16  float16  llama 2738 abf0 acdf a9f5 1f95 3600 28b1 b70d""",
    )


def test_golden_bits_of_the_kernels() -> None:
    lines = golden(TRITON).splitlines()
    assert lines
    assert set(lines) <= set(golden(CPU).splitlines())
