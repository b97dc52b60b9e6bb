"""Count what is launched."""

from __future__ import annotations

from typing import Any

import pytest


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that grows by one kernel for each launch from now on."""
    from rmsnorm_ops import executors

    launched: list[Any] = []

    def counting(run: Any) -> Any:
        def wrapper(prepared: Any, *arguments: Any) -> Any:
            launched.append(prepared.kernel)
            return run(prepared, *arguments)

        return wrapper

    for name in ("held", "interpreted"):
        monkeypatch.setattr(executors, name, counting(getattr(executors, name)))
    return launched
