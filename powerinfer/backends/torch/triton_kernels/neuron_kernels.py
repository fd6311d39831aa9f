"""Kernels of the sparse feed-forward: a list of active neurons, their activations, and the sum of their down rows.

A neuron is a row of gate, up and down_t. Kernels work on a list of rows whose length is in the device's memory: grids
have a fixed size and programs stop at the list's end, so nothing waits for the host and a CUDA graph can hold it all.
No floating-point sum depends on the order in which programs run; only whole numbers are added atomically.

h holds activations in the order of the list, (n_tokens, n_rows), of which the first `count` columns are written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from powerinfer.backends.torch.triton_kernels.tiles import row_products, tile_products


@triton.jit
def list_rows_kernel(ids, count, mask, n_rows, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """ids (n_rows,) int32 = the rows that mask (n_rows,) uint8 names, ascending; count (1,) int32 = how many.

    Each program lists a block of rows. Where its part of the list starts it counts itself, over all rows before: a
    few kB from the second-level cache cost less than a second kernel.
    """
    begin = tl.program_id(0) * BLOCK
    n_before = tl.zeros((), tl.int32)
    for start in range(0, begin, CHUNK):
        at = start + tl.arange(0, CHUNK)
        n_before += tl.sum((tl.load(mask + at, mask=at < begin, other=0) != 0).to(tl.int32))
    rows = begin + tl.arange(0, BLOCK)
    active = (tl.load(mask + rows, mask=rows < n_rows, other=0) != 0).to(tl.int32)
    tl.store(ids + n_before + tl.cumsum(active, axis=0) - active, rows, mask=active != 0)
    tl.store(count, n_before + tl.sum(active), mask=begin + BLOCK >= n_rows)


@triton.jit
def activate_one_kernel(
    h, ids, count, x, n_cols, counters,
    gate_quants, gate_scales, gate_superscales, gate_bias,
    up_quants, up_scales, up_superscales, up_bias,
    GATED: tl.constexpr, GATE_BIASED: tl.constexpr, UP_BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr, UP_ACTIVATION: tl.constexpr,
    GATE_DECODE: tl.constexpr, GATE_SUBS: tl.constexpr, UP_DECODE: tl.constexpr, UP_SUBS: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """h of one token x (n_cols,). Rows of up are read only where the gate is open. counters[1] += non-zero h."""
    n = tl.load(count)
    for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        at = start + tl.arange(0, ROWS)
        wanted = at < n
        rows = tl.load(ids + at, mask=wanted, other=0)
        gate = tl.full((ROWS,), 1.0, tl.float32)
        if GATED:
            gate = row_products(
                gate_quants, gate_scales, gate_superscales, rows.to(tl.int64), wanted, x, n_cols,
                GATE_DECODE, GATE_SUBS, UNITS, ROWS,
            )  # fmt: skip
            if GATE_BIASED:
                gate += tl.load(gate_bias + rows, mask=wanted, other=0.0)
            gate = ACTIVATION(gate)
        open = wanted & (gate != 0)
        up = row_products(
            up_quants, up_scales, up_superscales, rows.to(tl.int64), open, x, n_cols, UP_DECODE, UP_SUBS, UNITS, ROWS
        )  # fmt: skip
        if UP_BIASED:
            up += tl.load(up_bias + rows, mask=open, other=0.0)
        value = tl.where(open, gate * UP_ACTIVATION(up), 0.0)
        tl.store(h + at, value, mask=wanted)
        tl.atomic_add(counters + 1, tl.sum((value != 0).to(tl.int64)))


@triton.jit
def activate_many_kernel(
    h, ids, count, mask, x, n_tokens, n_rows, n_cols, counters,
    gate_quants, gate_scales, gate_superscales, gate_bias,
    up_quants, up_scales, up_superscales, up_bias,
    GATED: tl.constexpr, GATE_BIASED: tl.constexpr, UP_BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr, UP_ACTIVATION: tl.constexpr,
    GATE_DECODE: tl.constexpr, GATE_SUBS: tl.constexpr, UP_DECODE: tl.constexpr, UP_SUBS: tl.constexpr,
    UNITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h of several tokens x (n_tokens, n_cols); the list names what any of them needs, mask (n_tokens, n_rows) who."""
    n = tl.load(count)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS >= n:
        return
    wanted = at < n
    rows = tl.load(ids + at, mask=wanted, other=0)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = (tokens < n_tokens)[:, None] & wanted[None, :]
    open = inside & (tl.load(mask + tokens.to(tl.int64)[:, None] * n_rows + rows[None, :], mask=inside, other=0) != 0)
    gate = tl.full((TOKENS, ROWS), 1.0, tl.float32)
    if GATED:
        gate = tile_products(
            gate_quants, gate_scales, gate_superscales, rows.to(tl.int64), wanted, x, tokens, n_tokens, n_cols,
            0, tl.cdiv(n_cols, 16 * GATE_SUBS), GATE_DECODE, GATE_SUBS, UNITS, ROWS, TOKENS, PRECISION,
        )  # fmt: skip
        if GATE_BIASED:
            gate += tl.load(gate_bias + rows, mask=wanted, other=0.0)[None, :]
        gate = ACTIVATION(gate)
    open = open & (gate != 0)
    up_wanted = tl.max(open.to(tl.int32), axis=0) != 0
    up = tile_products(
        up_quants, up_scales, up_superscales, rows.to(tl.int64), up_wanted, x, tokens, n_tokens, n_cols,
        0, tl.cdiv(n_cols, 16 * UP_SUBS), UP_DECODE, UP_SUBS, UNITS, ROWS, TOKENS, PRECISION,
    )  # fmt: skip
    if UP_BIASED:
        up += tl.load(up_bias + rows, mask=wanted, other=0.0)[None, :]
    value = tl.where(open, gate * UP_ACTIVATION(up), 0.0)
    tl.store(h + tokens.to(tl.int64)[:, None] * n_rows + at[None, :], value, mask=inside)
    tl.atomic_add(counters + 1, tl.sum(tl.sum((value != 0).to(tl.int64), axis=1), axis=0))


@triton.jit
def down_one_kernel(
    parts, h, ids, count, quants, scales, superscales, n_rows, n_cols,
    LISTED: tl.constexpr, DECODE: tl.constexpr, SUBS: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """parts (n_parts, n_cols): part p sums h * row over positions p * ROWS.. of the list, one stride of parts apart.

    A warp reads 512 neighbouring bytes of ROWS rows and adds them up within its threads. Rows whose h is zero (the
    predictor's false positives) are not read. Not LISTED: the list is 0..n_rows - 1.
    """
    columns = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    part = tl.program_id(1)
    n = n_rows
    if LISTED:
        n = tl.load(count)
    first = tl.zeros((UNITS, 16), tl.float32)
    second = tl.zeros((UNITS, 16), tl.float32)
    for start in range(part * ROWS, n, tl.num_programs(1) * ROWS):
        at = start + tl.arange(0, ROWS)
        rows = at
        if LISTED:
            rows = tl.load(ids + at, mask=at < n, other=0)
        value = tl.load(h + at, mask=at < n, other=0.0).to(tl.float32)
        inside = (value != 0)[:, None] & (columns < tl.cdiv(n_cols, 16 * SUBS))[None, :]
        numbers, scale = DECODE(quants, scales, superscales, rows.to(tl.int64), columns, inside, n_cols, 0)
        first += tl.sum(numbers * (scale * value[:, None])[:, :, None], axis=0)
        if SUBS == 2:
            numbers, scale = DECODE(quants, scales, superscales, rows.to(tl.int64), columns, inside, n_cols, 1)
            second += tl.sum(numbers * (scale * value[:, None])[:, :, None], axis=0)
    at = columns[:, None] * (16 * SUBS) + tl.arange(0, 16)[None, :]
    tl.store(parts + part * n_cols + at, first, mask=at < n_cols)
    if SUBS == 2:
        tl.store(parts + part * n_cols + at + 16, second, mask=at + 16 < n_cols)


@triton.jit
def down_many_kernel(
    parts, h, ids, count, quants, scales, superscales, n_tokens, n_rows, n_cols,
    LISTED: tl.constexpr, DECODE: tl.constexpr, SUBS: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts (n_parts, n_tokens, n_cols), as `down_one_kernel`, for several tokens' h (n_tokens, n_rows)."""
    columns = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    n = n_rows
    if LISTED:
        n = tl.load(count)
    first = tl.zeros((TOKENS, UNITS * 16), tl.float32)
    second = tl.zeros((TOKENS, UNITS * 16), tl.float32)
    for start in range(part * ROWS, n, tl.num_programs(2) * ROWS):
        at = start + tl.arange(0, ROWS)
        rows = at
        if LISTED:
            rows = tl.load(ids + at, mask=at < n, other=0)
        mask = (tokens < n_tokens)[:, None] & (at < n)[None, :]
        values = tl.load(h + tokens.to(tl.int64)[:, None] * n_rows + at[None, :], mask=mask, other=0.0).to(tl.float32)
        inside = (at < n)[:, None] & (columns < tl.cdiv(n_cols, 16 * SUBS))[None, :]
        numbers, scale = DECODE(quants, scales, superscales, rows.to(tl.int64), columns, inside, n_cols, 0)
        weights = tl.reshape(numbers * scale[:, :, None], (ROWS, UNITS * 16))
        first = tl.dot(values, weights, first, input_precision=PRECISION)
        if SUBS == 2:
            numbers, scale = DECODE(quants, scales, superscales, rows.to(tl.int64), columns, inside, n_cols, 1)
            weights = tl.reshape(numbers * scale[:, :, None], (ROWS, UNITS * 16))
            second = tl.dot(values, weights, second, input_precision=PRECISION)
    at = tl.program_id(0) * UNITS + tl.arange(0, UNITS * 16) // 16
    at = at * (16 * SUBS) + tl.arange(0, UNITS * 16) % 16
    out = parts + (part.to(tl.int64) * n_tokens + tokens[:, None]) * n_cols + at[None, :]
    mask = (tokens < n_tokens)[:, None] & (at < n_cols)[None, :]
    tl.store(out, first, mask=mask)
    if SUBS == 2:
        tl.store(out + 16, second, mask=mask)
