"""Where the kernels run: on the GPU if there is one, else through Triton's interpreter. And Hypothesis's profiles."""

import contextlib
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported, which nothing above does

with contextlib.suppress(ImportError):  # without triton the CPU operator is what there is to test
    import triton.language  # noqa: F401  (now, before a test changes the variable for itself)

from tests.implementations import IMPLEMENTATIONS, OPERATORS, Implementation

COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", settings(derandomize=True, database=None, max_examples=30, **COMMON))
settings.register_profile("long", settings(max_examples=1000, **COMMON))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    # numpy's, where a kernel that is interpreted computes infinity or NaN as it should.
    for where in ("ignore::RuntimeWarning:triton.runtime.interpreter", "ignore:overflow encountered in reduce:RuntimeWarning"):
        config.addinivalue_line("filterwarnings", where)


# Of session scope, so that @given may use them.
@pytest.fixture(scope="session", params=IMPLEMENTATIONS, ids=str)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """Each implementation of the forward, the plain torch body included."""
    return request.param


@pytest.fixture(scope="session", params=OPERATORS, ids=str)
def operator(request: pytest.FixtureRequest) -> Implementation:
    """Each implementation whose bits the contract pins: the CPU operator and the Triton kernels."""
    return request.param
