"""Shapes that models have, and shapes that break kernels, as data. A case is a shape, a layout and options; dtype, device
and the number of rows are the caller's, so that a check, a test and a benchmark run the same cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
DTYPES = tuple(SHORT)

# Magnitudes whose squares leave the compute type (fp32; fp64 for fp64). fp16 has no such range: its own ends stand in.
HUGE = {torch.float16: 2e4, torch.bfloat16: 1e25, torch.float32: 1e25, torch.float64: 1e200}
TINY = {torch.float16: 1e-4, torch.bfloat16: 1e-30, torch.float32: 1e-30, torch.float64: 1e-200}


@dataclass(frozen=True)
class Case:
    """One call of the norm.

    Layouts of x, each of ``rows`` rows of ``hidden`` elements:
        dense: ``[rows, hidden]``.
        slice: columns from ``start`` of ``[tokens, width]``, seen as ``[2, tokens / 2, heads, hidden]`` where heads > 1.
        transposed: ``[1, heads, tokens, hidden]`` over memory ``[1, tokens, heads, hidden]``.
        columns: ``[rows, hidden]`` over memory ``[hidden, rows]``: the last stride is not 1.
    """

    name: str
    source: str  # where the shape comes from
    rows: int  # of a typical call
    hidden: int
    layout: Literal["dense", "slice", "transposed", "columns"] = "dense"
    heads: int = 1
    width: int = 0  # of a slice's parent, in elements
    start: int = 0  # of a slice in its parent, in elements
    weight: Literal["as x", "float32", "none"] = "as x"  # the weight's dtype
    eps: float = 1e-6
    weight_offset: float = 0.0
    round_before_weight: bool = False
    values: Literal["normal", "huge", "tiny", "constant"] = "normal"
    timed: bool = False  # one of the sizes whose speed is tracked: check times it
    benched: bool = False  # in the benchmark's default list
    few: bool = False  # timed at its own rows; others at as many as fill the memory system

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the operator."""
        return {"weight_offset": self.weight_offset, "round_before_weight": self.round_before_weight}


class Operands(NamedTuple):
    x: Tensor
    weight: Tensor | None


CASES = (
    # Norms over one head or one latent: many short rows.
    Case("head 128", "Qwen3-8B: 32 query heads of 128, dense", 4096 * 32, 128, timed=True, benched=True),
    Case("q of fused qkv", "Qwen3-8B: 32 query heads of 128 in 48 heads", 4096 * 32, 128, "slice", 32, 48 * 128),
    Case("k of fused qkv", "Qwen3-8B: 8 key heads after the queries", 4096 * 8, 128, "slice", 8, 48 * 128, 32 * 128),
    Case("q without weight", "Llama 4: query and key norm has no weight", 4096 * 40, 128, weight="none", eps=1e-5),
    Case("q transposed", "Gemma 3 4B: 8 heads of 256, +1", 4096 * 8, 256, "transposed", 8, weight_offset=1.0),
    Case("kv latent 512", "DeepSeek-V3: 512 of the 576 columns of kv_a_proj", 4096, 512, "slice", width=576),
    Case("q latent 1536", "DeepSeek-V3: q_lora_rank", 4096, 1536),
    # Norms over the residual stream.
    Case("T5 small", "d_model 512", 4096, 512, timed=True),
    Case("Qwen3 0.6B", "hidden_size 1024", 4096, 1024, timed=True, benched=True),
    Case("Llama 3.2 1B", "hidden_size 2048", 4096, 2048, eps=1e-5, timed=True),
    Case("Gemma 2 2B", "hidden_size 2304, weight + 1", 4096, 2304, weight_offset=1.0),
    Case("gpt-oss", "hidden_size 2880 of 20b and 120b", 4096, 2880, eps=1e-5, timed=True, benched=True),
    Case("Llama 3.1 8B", "hidden_size 4096", 4096, 4096, eps=1e-5, timed=True, benched=True),
    Case("Llama 3.1 8B one token", "decoding at batch 1", 1, 4096, eps=1e-5),
    Case("Llama 3.1 8B rounded", "x rounded before the weight", 4096, 4096, eps=1e-5, round_before_weight=True),
    Case("Qwen3 8B fp32 weight", "mixed-precision training", 4096, 4096, weight="float32"),
    Case("Qwen3 14B", "hidden_size 5120", 4096, 5120, timed=True, benched=True),
    Case("DeepSeek-V3", "hidden_size 7168", 4096, 7168, timed=True),
    Case("Llama 3.1 70B", "hidden_size 8192", 4096, 8192, eps=1e-5, timed=True, benched=True),
    Case("Llama 3.1 405B", "hidden_size 16384", 4096, 16384, eps=1e-5, timed=True, benched=True),
    # Sizes that no kernel is tuned for.
    Case("one element", "y = ±weight where eps is small", 300, 1),
    Case("odd 7", "narrower than one 16-byte load", 300, 7),
    Case("odd 63", "one short of a power of two", 300, 63),
    Case("odd 769", "one over GPT-2's 768: rows start unaligned", 37, 769, round_before_weight=True),
    Case("odd 1000", "multiple of 8, not of 16", 37, 1000, weight_offset=1.0),
    Case("odd 1001", "odd, near a power of two", 37, 1001, weight="none"),
    Case("odd 5125", "a ragged second block", 37, 5125),
    Case("wide 40000", "more than a program holds in registers", 5, 40000),
    Case("wide 131072", "several blocks of a streamed row", 3, 131072, weight="float32"),
    Case("unaligned rows", "columns 1 to 1000 of rows of 1001", 37, 1000, "slice", width=1001, start=1),
    Case("column-major", "last stride is not 1", 37, 1000, "columns"),
    # The whole range of the dtypes.
    Case("huge", "squares overflow", 37, 1000, eps=1e-6, values="huge"),
    Case("huge streamed", "squares overflow in a wide row", 3, 40000, values="huge"),
    Case("tiny eps 0", "squares underflow and no eps hides it", 37, 1000, eps=0.0, values="tiny"),
    Case("tiny streamed eps 0", "squares underflow in a wide row", 3, 40000, eps=0.0, values="tiny"),
    Case("tiny eps 1e-6", "eps decides", 37, 1000, values="tiny"),
    Case("constant", "equal numbers add up all their rounding errors", 5, 16384, values="constant"),
)

# What only benchmarks run: other widths, and few rows, as decoding and short prompts have them.
SIZES = (
    Case("hidden 64", "heads of 64: gpt-oss", 4096 * 64, 64),
    Case("hidden 576", "SmolLM2 135M", 4096, 576),
    Case("hidden 1001", "odd: rows start unaligned", 4096, 1001),
    Case("hidden 1536", "Qwen2.5 1.5B", 4096, 1536),
    Case("hidden 3584", "Qwen2.5 7B", 4096, 3584),
    Case("hidden 4095", "one short of a power of two", 4096, 4095),
    Case("hidden 5125", "a ragged second block", 4096, 5125),
    Case("hidden 12288", "GPT-3 175B", 4096, 12288),
    Case("hidden 13824", "Llama 2 13B's intermediate_size", 4096, 13824),
    Case("hidden 32768", "wider than models are", 1024, 32768),
    Case("hidden 65536", "wider than models are", 512, 65536, benched=True),
    Case("hidden 131072", "wider than models are", 256, 131072),
    Case("hidden 262144", "wider than models are", 128, 262144),
    *(
        Case(f"few {rows} × {hidden}", f"{rows} rows of {hidden}", rows, hidden, benched=True, few=True)
        for rows, hidden in (
            (1, 4096), (16, 4096), (64, 4096), (256, 4096), (4096, 4096),
            (1, 7168), (64, 7168), (1, 16384), (1024, 8192), (2048, 128),
        )
    ),
)  # fmt: skip


def make(
    case: Case, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0, rows: int | None = None
) -> Operands:
    """x and weight of ``case``: the same bits for the same arguments on the same kind of device.

    ``rows`` replaces the case's own number of rows; a layout of several heads rounds it up to whole tokens.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = _fill(torch.empty(0, dtype=dtype, device=device), case, generator, case.rows if rows is None else rows)
    if case.weight == "none":
        return Operands(x, None)
    weight_dtype = torch.float32 if case.weight == "float32" else dtype
    return Operands(x, torch.randn(case.hidden, dtype=weight_dtype, device=device, generator=generator))


def _fill(like: Tensor, case: Case, generator: torch.Generator, rows: int) -> Tensor:
    """x of ``like``'s dtype and device. Values are drawn over the memory, then seen through the layout."""
    tokens = -(-rows // case.heads)
    if case.layout == "slice":
        batch = 2 if case.heads > 1 else 1
        memory = _draw(like, case, generator, (batch, -(-tokens // batch), case.width))
        x = memory[..., case.start : case.start + case.heads * case.hidden]
        return x.unflatten(-1, (case.heads, case.hidden)) if case.heads > 1 else x[0]
    if case.layout == "transposed":
        return _draw(like, case, generator, (1, tokens, case.heads, case.hidden)).transpose(1, 2)
    if case.layout == "columns":
        return _draw(like, case, generator, (case.hidden, rows)).t()
    return _draw(like, case, generator, (rows, case.hidden))


def _draw(like: Tensor, case: Case, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    if case.values == "constant":
        return torch.full(shape, 1.1, dtype=like.dtype, device=like.device)
    x = torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)
    if case.values == "normal":
        return x
    largest = torch.finfo(like.dtype).max
    return x.mul_((HUGE if case.values == "huge" else TINY)[like.dtype]).clamp_(-largest, largest)
