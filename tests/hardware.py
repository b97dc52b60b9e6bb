"""What a test needs that not every machine has. A skip says what is missing."""

import shutil

import pytest
import torch

from tests.implementations import GPU

GIB = 2**30


def memory() -> float:
    return torch.cuda.get_device_properties(0).total_memory / GIB if GPU else 0.0


def needs_gpu(gigabytes: float = 0) -> pytest.MarkDecorator:
    """Marks ``gpu``, and skips where there is none, or none of that much memory."""
    missing = "needs a GPU" if not GPU else f"needs a GPU with {gigabytes:g} GB of memory"
    return combined(pytest.mark.gpu, pytest.mark.skipif(not GPU or memory() < gigabytes, reason=missing))


def combined(*marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    def decorate(function: object) -> object:
        for mark in marks:
            function = mark(function)
        return function

    return decorate


two_gpus = combined(pytest.mark.gpu, pytest.mark.skipif(not GPU or torch.cuda.device_count() < 2, reason="needs two GPUs"))
needs_a_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
