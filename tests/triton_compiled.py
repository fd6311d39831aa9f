"""Compiles Triton kernels for an RTX 4090 (8.9) and an H200 (9.0), and prints a line of each: its name, loads of 16
bytes, stores of spilled registers, bytes of shared memory. Run by `test_triton_kernels.py`."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from powerinfer.backends.torch.triton_kernels import activations, neuron_kernels, product_kernels
from powerinfer.backends.torch.triton_kernels.products import PRECISION
from powerinfer.backends.torch.triton_kernels.weights import FORMATS

POINTERS = {
    "ids": "*i32", "count": "*i32", "mask": "*u8", "counters": "*i64",
    **dict.fromkeys(("out", "parts", "h", "x", "bias", "gate_bias", "up_bias"), "*fp32"),
}  # fmt: skip
QUANTS = {"F16": ("*fp16", "*fp16"), "Q4_0": ("*u8", "*fp16"), "Q8_0": ("*i8", "*fp16"), "Q6_K": ("*u8", "*i8")}


def compile_kernel(capability: int, kernel: Any, type_name: str, n_warps: int, **constants: Any) -> None:
    quants, scales = QUANTS[type_name]
    held = FORMATS[type_name]
    names = kernel.arg_names
    for name in names:
        constants |= {name: held.decode} if name.endswith("DECODE") else {}
        constants |= {name: held.groups} if name.endswith("SUBS") else {}
    ends = {"_superscales": "*fp16", "_scales": scales, "_quants": quants}
    kinds = {
        n: next((kind for end, kind in ends.items() if f"_{n}".endswith(end)), POINTERS.get(n, "i32")) for n in names
    }
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [n for n in names if signature[n].startswith("*") or n in ("n_cols", "n_rows")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": n_warps, "num_stages": 2, "enable_fp_fusion": True}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    code = done.asm["ptx"]
    wide = len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\S*", code))
    print(f"{kernel.__name__}:{type_name}", wide, len(re.findall(r"st\.local", code)), done.metadata.shared)


def main() -> None:
    gated = {
        "GATED": True, "GATE_BIASED": False, "UP_BIASED": False,
        "ACTIVATION": activations.relu, "UP_ACTIVATION": activations.identity,
    }  # fmt: skip
    tile = {"UNITS": 2, "PRECISION": PRECISION}
    compile_kernel(89, product_kernels.one_token_kernel, "Q6_K", 4, HAS_BIAS=True, UNITS=128, ROWS=4)
    compile_kernel(89, neuron_kernels.activate_one_kernel, "Q4_0", 4, **gated, UNITS=128, ROWS=2)
    compile_kernel(89, neuron_kernels.down_one_kernel, "Q4_0", 1, LISTED=True, UNITS=32, ROWS=8)
    compile_kernel(89, neuron_kernels.activate_many_kernel, "Q4_0", 4, **gated, **tile, ROWS=64, TOKENS=64)
    compile_kernel(90, product_kernels.many_tokens_kernel, "Q4_0", 4, **tile, ROWS=64, TOKENS=128)


if __name__ == "__main__":
    main()
