"""From packed weights to numbers: one function a format, called by every kernel with the format's own as a constant.

A *unit* is what 16 neighbouring bytes of a row hold: 16 elements, or 32 where a byte holds two. A thread takes a unit
with one load of 16 bytes; neighbouring threads take neighbouring units, so a warp reads 512 bytes in one go. Elements
of a unit form SUBS groups of 16, and group SUB is decoded at a time: element 16 * SUB + j is in byte j.

Every function takes

    quants, scales, superscales   pointers to the tensors that `weights.py` packs (the last two unused by some formats)
    rows (R,) int64, units (B,)   which rows and which units of them
    inside (R, B)                 where something is to be read: elsewhere no bytes are moved and numbers are arbitrary
    n_cols                        elements of a row
    SUB                           the group, 0 or 1

and returns float32 numbers (R, B, 16) and scales (R, B), weight = number * scale; scales are 0 where nothing was read.
The two calls for SUB 0 and 1 load the same bytes; the compiler merges the loads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_plain(quants, scales, superscales, rows, units, inside, n_cols, SUB: tl.constexpr):
    """F32, F16. quants (n_rows, n_cols) of that type. The last unit may be cut short by the row's end."""
    columns = units[:, None] * 16 + tl.arange(0, 16)[None, :]
    mask = inside[:, :, None] & (columns < n_cols)[None, :, :]
    numbers = tl.load(quants + rows[:, None, None] * n_cols + columns[None, :, :], mask=mask, other=0.0)
    return numbers.to(tl.float32), tl.where(inside, 1.0, 0.0)


@triton.jit
def decode_bf16(quants, scales, superscales, rows, units, inside, n_cols, SUB: tl.constexpr):
    """quants int16 (n_rows, n_cols): the upper halves of float32."""
    columns = units[:, None] * 16 + tl.arange(0, 16)[None, :]
    mask = inside[:, :, None] & (columns < n_cols)[None, :, :]
    halves = tl.load(quants + rows[:, None, None] * n_cols + columns[None, :, :], mask=mask, other=0)
    return (halves.to(tl.int32) << 16).to(tl.float32, bitcast=True), tl.where(inside, 1.0, 0.0)


@triton.jit
def decode_q4_0(quants, scales, superscales, rows, units, inside, n_cols, SUB: tl.constexpr):
    """quants uint8 (n_rows, units, 16): low nibbles are elements 0..15. scales float16 (n_rows, units)."""
    n_units = n_cols // 32
    at = units[:, None] * 16 + tl.arange(0, 16)[None, :]
    # n_units * 16, not n_cols / 2: the compiler sees that rows are aligned to 16 bytes, and loads 16 at a time
    packed = tl.load(quants + rows[:, None, None] * (n_units * 16) + at[None, :, :], mask=inside[:, :, None], other=0)
    scale = tl.load(scales + rows[:, None] * n_units + units[None, :], mask=inside, other=0.0).to(tl.float32)
    return ((packed >> (4 * SUB)) & 15).to(tl.float32) - 8.0, scale


@triton.jit
def decode_q8_0(quants, scales, superscales, rows, units, inside, n_cols, SUB: tl.constexpr):
    """quants int8 (n_rows, units, 16). scales float16 (n_rows, units / 2)."""
    n_blocks = n_cols // 32
    at = units[:, None] * 16 + tl.arange(0, 16)[None, :]
    numbers = tl.load(quants + rows[:, None, None] * (n_blocks * 32) + at[None, :, :], mask=inside[:, :, None], other=0)
    scale = tl.load(scales + rows[:, None] * n_blocks + units[None, :] // 2, mask=inside, other=0.0)
    return numbers.to(tl.float32), scale.to(tl.float32)


@triton.jit
def decode_q6_k(quants, scales, superscales, rows, units, inside, n_cols, SUB: tl.constexpr):
    """quants uint8 (n_rows, units * 24): units * 16 bytes of low nibbles as in Q4_0, then units / 2 * 16 of high pairs.

    Byte j of the pairs of units 2i and 2i + 1 holds, from bit 0 on, those of elements j and 16 + j of unit 2i, then of
    unit 2i + 1. scales int8 (n_rows, units, 2), one a group. superscales float16 (n_rows, units / 8).
    """
    n_blocks = n_cols // 256
    at = units[:, None] * 16 + tl.arange(0, 16)[None, :]
    pairs_at = n_blocks * 128 + (units[:, None] // 2) * 16 + tl.arange(0, 16)[None, :]
    row = quants + rows[:, None, None] * (n_blocks * 192)
    low = tl.load(row + at[None, :, :], mask=inside[:, :, None], other=0).to(tl.int32)
    high = tl.load(row + pairs_at[None, :, :], mask=inside[:, :, None], other=0).to(tl.int32)
    shift = (units % 2) * 4 + 2 * SUB
    number = ((low >> (4 * SUB)) & 15) | (((high >> shift[None, :, None]) & 3) << 4)
    scale = tl.load(scales + rows[:, None] * (n_blocks * 16) + units[None, :] * 2 + SUB, mask=inside, other=0)
    superscale = tl.load(superscales + rows[:, None] * n_blocks + units[None, :] // 8, mask=inside, other=0.0)
    return (number - 32).to(tl.float32), superscale.to(tl.float32) * scale.to(tl.float32)
