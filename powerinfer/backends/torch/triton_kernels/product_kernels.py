"""Kernels of y = x W^T + b: one token, and several."""

from __future__ import annotations

import triton
import triton.language as tl

from powerinfer.backends.torch.triton_kernels.tiles import row_products, tile_products


@triton.jit
def one_token_kernel(
    out, quants, scales, superscales, x, bias, n_rows, n_cols,
    HAS_BIAS: tl.constexpr, DECODE: tl.constexpr, SUBS: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wanted = rows < n_rows
    y = row_products(quants, scales, superscales, rows.to(tl.int64), wanted, x, n_cols, DECODE, SUBS, UNITS, ROWS)
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=wanted, other=0.0)
    tl.store(out + rows, y, mask=wanted)


@triton.jit
def many_tokens_kernel(
    parts, quants, scales, superscales, x, n_tokens, n_rows, n_cols, units_a_part,
    DECODE: tl.constexpr, SUBS: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """parts (n_parts, n_tokens, n_rows): part p sums units p * units_a_part.. of every row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    wanted = rows < n_rows
    begin = part * units_a_part
    end = tl.minimum(begin + units_a_part, tl.cdiv(n_cols, 16 * SUBS))
    y = tile_products(
        quants, scales, superscales, rows.to(tl.int64), wanted, x, tokens, n_tokens, n_cols, begin, end,
        DECODE, SUBS, UNITS, ROWS, TOKENS, PRECISION,
    )  # fmt: skip
    at = (part.to(tl.int64) * n_tokens + tokens[:, None]) * n_rows + rows[None, :]
    tl.store(parts + at, y, mask=(tokens < n_tokens)[:, None] & wanted[None, :])
