"""docs/pytorch.md names a test for what it claims: the tests are there."""

from __future__ import annotations

import re

from tests.processes import HERE


def test_the_tests_that_the_table_names_are_there() -> None:
    text = (HERE / "docs" / "pytorch.md").read_text()
    files = set(re.findall(r"\b(?:integrations/)?test_\w+\.py", text))
    assert len(files) > 15
    missing = [name for name in files if not (HERE / "tests" / name).exists()]
    source = "".join(path.read_text() for path in (HERE / "tests").rglob("*.py"))
    functions = set(re.findall(r"`(test_\w+)`", text)) | {"sequence_parallel", "sequence_parallel_compiled", "fully_sharded"}
    missing += [name for name in functions if f"def {name}(" not in source]
    missing += [name for name in re.findall(r"examples/\S+\.py", text) if not (HERE / name).exists()]
    assert not missing
