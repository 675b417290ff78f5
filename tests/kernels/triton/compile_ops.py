"""Compiles what the ops launch for one policy and GPU on a machine without one; run as a program by the tests.

Every launch is caught where it would start and compiled instead, so signatures and launch configurations are the
real ones. Prints one JSON object a kernel: its name, its stack bytes a thread (spilled registers), and the bytes of
shared memory that a program takes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from tests.kernels.triton.cache_state import frequencies_of, make_state
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ottserve.kernels import launch
from ottserve.kernels.attend_decode import triton as decode
from ottserve.kernels.attend_prefill import triton as prefill
from ottserve.kernels.layout import EXACT_BITS, PageLayout
from ottserve.kernels.seal import Chunks
from ottserve.kernels.seal import triton as seal
from ottserve.kernels.write_tail import triton as write_tail

NAMES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


CAPABILITY, SHARED_MEMORY = map(int, sys.argv[1:3])
"""Of the GPU: 90 is that of an H200. Bytes that a program may use."""


def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """Stands in for `JITFunction.run`."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: named.pop(name) for name in kernel.arg_names if name in named}
    constant = {param.name for param in kernel.params if param.is_constexpr or values[param.name] is None}
    signature = {name: "constexpr" if name in constant else type_of(value) for name, value in values.items()}
    order = list(values)
    aligned = [
        param.name for param in kernel.params if signature[param.name] != "constexpr" and is_aligned(param, values)
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(order.index(name),): values[name] for name in constant},
        attrs={(order.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=named)
    stack, shared = stack_bytes(compiled.asm["cubin"]), compiled.metadata.shared
    print(json.dumps({"kernel": kernel.__name__, "stack": stack, "shared": shared}))


def is_aligned(param: Any, values: dict[str, Any]) -> bool:
    """Whether the code may count on a multiple of 16, as a launch would find it."""
    if isinstance(values[param.name], torch.Tensor):
        return not param.do_not_specialize_on_alignment
    return isinstance(values[param.name], int) and not param.do_not_specialize and values[param.name] % 16 == 0


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return NAMES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def stack_bytes(cubin: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(number) for number in re.findall(r"STACK:(\d+)", report))


def launch_everything(layout: PageLayout) -> None:
    state = make_state(layout, [300], heads=2, places=35)
    dtype = layout.exact_dtype
    q, k = torch.zeros(1, 8, layout.head_size, dtype=dtype), torch.zeros(1, 2, layout.head_size, dtype=dtype)
    args = (state.pages, state.slots, layout, state.page_table, state.num_pages, state.slot_ids, state.lengths, 0.1)
    frequencies = frequencies_of(layout)
    decode.attend_decode(q, *args, frequencies=frequencies)
    starts = torch.tensor([0, 1]).int()
    prefill.attend_prefill(q, k, k, starts, *args, frequencies)
    if layout.k_bits == EXACT_BITS:  # without pages, one kernel for all policies
        prefill.attend_prefill(q, k, k, starts, *args[:3], state.page_table[:, :0], *args[4:])
    write_tail.write_tail(state.slots, k, k, state.slot_ids, state.lengths)
    one = torch.ones(1, dtype=torch.int32)
    for fit_rounds in (0, 8):
        how = "smallest", fit_rounds, fit_rounds > 0, frequencies
        seal.seal(state.pages, state.slots, layout, one, one, one, one, *how)
        bounds, zero = torch.tensor([0, 1]).int(), torch.zeros(1, dtype=torch.int32)
        chunks = Chunks(k, k, bounds, one, one, bounds, zero, one, one)
        seal.seal_chunks(state.pages, state.slots, layout, chunks, one, *how)


if __name__ == "__main__":
    triton.JITFunction.run = compile_instead
    launch.shared_memory = lambda device: SHARED_MEMORY
    head_size, k_bits, v_bits, k_subgroups = map(int, sys.argv[3:7])
    exact = {"fp16": torch.float16, "bf16": torch.bfloat16}[sys.argv[7]]
    launch_everything(PageLayout(128, head_size, k_bits, v_bits, k_subgroups, exact, *map(int, sys.argv[8:])))
