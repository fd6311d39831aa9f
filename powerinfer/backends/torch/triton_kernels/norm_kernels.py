"""The kernel of RMSNorm and LayerNorm."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(out, x, weight, bias, n_cols, eps, CENTRED: tl.constexpr, BIASED: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    mask = columns < n_cols
    start = tl.program_id(0).to(tl.int64) * n_cols
    values = tl.load(x + start + columns, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        values = tl.where(mask, values - tl.sum(values, axis=0) / n_cols, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / n_cols + eps)
    values *= tl.load(weight + columns, mask=mask, other=0.0)
    if BIASED:
        values += tl.load(bias + columns, mask=mask, other=0.0)
    tl.store(out + start + columns, values, mask=mask)
