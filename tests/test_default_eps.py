"""eps=None is torch.nn.functional.rms_norm's rule, as the installed torch has it."""

import pytest
import torch
from torch.nn import functional as F

from rmsnorm_ops import accuracy, rms_norm
from rmsnorm_ops.contracts import default_eps
from tests.implementations import DEVICES, DTYPES, assert_same_bits, random

# Where eps is most of the mean square, y tells it: half types could have either of two, 2⁻²³ or their own.
MAGNITUDE = {torch.float16: 2.0**-13, torch.bfloat16: 2.0**-13, torch.float32: 2.0**-13, torch.float64: 2.0**-27}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rule_of_torch(dtype: torch.dtype, weighted: bool, device: str) -> None:
    x = (random(4, 256, dtype=torch.float64) * MAGNITUDE[dtype]).to(dtype).to(device)
    weight = random(256, dtype=dtype, device=device) if weighted else None
    y, theirs = rms_norm(x, weight), F.rms_norm(x, (256,), weight)
    assert y.dtype is theirs.dtype is dtype
    eps = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    bound = accuracy.forward_bound(dtype)
    assert accuracy.forward_error(y, x, weight, eps) <= bound
    assert accuracy.forward_error(theirs, x, weight, eps) <= bound + 2, "torch's rule is another one"
    assert accuracy.forward_error(theirs, x, weight, torch.finfo(dtype).eps * 1.01) > bound + 2, "x cannot tell"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_none_is_the_number_it_stands_for(dtype: torch.dtype) -> None:
    x = random(3, 32, dtype=dtype) * 2.0**-12
    assert_same_bits(rms_norm(x), rms_norm(x, None, default_eps(dtype)))
    assert_same_bits(rms_norm(x, x[0]), torch.ops.rmsnorm.forward(x, x[0], default_eps(dtype)))


def test_options_reach_the_operator() -> None:
    x, weight = random(3, 32, dtype=torch.bfloat16), random(32, seed=1)
    for options in ({"weight_offset": 1.0}, {"round_before_weight": True}, {"weight_offset": 0.5, "round_before_weight": True}):
        y = rms_norm(x, weight, 1e-6, **options)
        assert_same_bits(y, torch.ops.rmsnorm.forward(x, weight, 1e-6, **options))
        assert not torch.equal(y, rms_norm(x, weight, 1e-6))
