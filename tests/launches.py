"""Count what is launched."""

from __future__ import annotations

from typing import Any

import pytest

from rmsnorm_ops import launch, launch_backward, launch_quant


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that grows by one kernel for each launch from now on."""
    launched: list[Any] = []

    def counting(run: Any) -> Any:
        def wrapper(prepared: Any, *arguments: Any) -> Any:
            launched.append(prepared.kernel)
            return run(prepared, *arguments)

        return wrapper

    for module in (launch, launch_backward, launch_quant):
        monkeypatch.setattr(module, "launch", counting(module.launch))
    return launched
