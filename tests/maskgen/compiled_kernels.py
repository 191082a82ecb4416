"""Run by test_kernels.py: compiles the kernels for an H200 (sm_90), which needs no GPU.

What the interpreter lets pass the compiler may refuse. Prints one JSON line a kernel: its name and
the size of its machine code in bytes.
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from maskgen import kernels

POINTER = "*i32"
TABLES = dict.fromkeys(("num_partial_ptr", "partial_ptr", "num_full_ptr", "full_ptr"), POINTER)
KINDS = {"kinds_ptr": "*u8"}
BLOCKS = {"R": "i32", "C": "i32"}
SPANS = {"starts_ptr": POINTER, "ends_ptr": POINTER}
LENGTHS = {"Q_LEN": "i32", "KV_LEN": "i32", "K": "i32"}
ROWS = SPANS | TABLES | KINDS | LENGTHS | BLOCKS
COLUMNS = KINDS | TABLES | BLOCKS


def main():
    cases = [
        (
            kernels.rows_kernel,
            ROWS,
            {"Q_BLOCK": Q, "KV_BLOCK": KV, "ALL_ROWS": Q, "ROWS": 32, "COLUMNS": 128},
        )
        for Q, KV in ((128, 128), (1024, 512))
    ]
    cases.append((kernels.columns_kernel, COLUMNS, {"BLOCK_ROWS": 1024}))
    for kernel, signature, constants in cases:
        source = ASTSource(
            fn=kernel,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(json.dumps({"kernel": kernel.__name__, "bytes": len(compiled.asm["cubin"])}))


if __name__ == "__main__":
    main()
