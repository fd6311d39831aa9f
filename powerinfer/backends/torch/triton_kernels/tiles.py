"""What kernels share: products of whole rows with activations, and sums of partial results."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_products(
    quants, scales, superscales, rows, wanted, x, n_cols,
    DECODE: tl.constexpr, SUBS: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """w · x of ROWS rows and one token x (n_cols,): float32 (ROWS,). Rows that are not wanted are not read.

    Float32 throughout, on the ordinary cores: at one token memory is the limit. A thread keeps its part of x for all
    ROWS rows, else reading x (8 bytes from the first-level cache for each byte of Q4_0) would be what limits.
    """
    n_units = tl.cdiv(n_cols, 16 * SUBS)
    total = tl.zeros((ROWS, UNITS), tl.float32)
    for start in range(0, n_units, UNITS):
        units = start + tl.arange(0, UNITS)
        inside = wanted[:, None] & (units < n_units)[None, :]
        for sub in tl.static_range(SUBS):
            columns = units[:, None] * (16 * SUBS) + sub * 16 + tl.arange(0, 16)[None, :]
            values = tl.load(x + columns, mask=columns < n_cols, other=0.0).to(tl.float32)
            numbers, scale = DECODE(quants, scales, superscales, rows, units, inside, n_cols, sub)
            total += scale * tl.sum(numbers * values[None, :, :], axis=2)
    return tl.sum(total, axis=1)


@triton.jit
def tile_products(
    quants, scales, superscales, rows, wanted, x, tokens, n_tokens, n_cols, begin, end,
    DECODE: tl.constexpr, SUBS: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """w · x of ROWS rows and TOKENS tokens, over units begin..end of each row: float32 (TOKENS, ROWS).

    x (n_tokens, n_cols). Weights are decoded once for all of the tile's tokens.
    """
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(begin, end, UNITS):
        units = start + tl.arange(0, UNITS)
        inside = wanted[:, None] & (units < end)[None, :]
        for sub in tl.static_range(SUBS):
            at = tl.arange(0, UNITS * 16)
            columns = (start + at // 16) * (16 * SUBS) + sub * 16 + at % 16
            mask = (tokens < n_tokens)[:, None] & ((start + at // 16 < end) & (columns < n_cols))[None, :]
            values = tl.load(x + tokens.to(tl.int64)[:, None] * n_cols + columns[None, :], mask=mask, other=0.0)
            numbers, scale = DECODE(quants, scales, superscales, rows, units, inside, n_cols, sub)
            weights = tl.reshape(numbers * scale[:, :, None], (ROWS, UNITS * 16))
            total = tl.dot(values.to(tl.float32), tl.trans(weights), total, input_precision=PRECISION)
    return total


@triton.jit
def sum_parts_kernel(
    out, parts, bias, n, n_cols, n_parts, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):
    """out (n,) = the sum of parts (n_parts, n) in a fixed order, + bias (n_cols,) where n = n_tokens * n_cols."""
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, n_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        mask = (part < n_parts)[:, None] & (at < n)[None, :]
        total += tl.sum(tl.load(parts + part.to(tl.int64)[:, None] * n + at[None, :], mask=mask, other=0.0), axis=0)
    if HAS_BIAS:
        total += tl.load(bias + at % n_cols, mask=at < n, other=0.0)
    tl.store(out + at, total, mask=at < n)
