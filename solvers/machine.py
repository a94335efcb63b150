"""A translated loop as machine code in this process, to be called with numbers and NumPy's arrays."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from solvers.translation import ENTRY, leaves, signature, symbol, together, translated, types

DATA, SHAPE = object.__basicsize__, object.__basicsize__ + 16
"""Where an array's object holds the addresses of its entries and of its shape, in bytes: the ``PyArrayObject`` in NumPy's headers, which
all that is compiled for NumPy 2 relies on. Asking NumPy for an address takes longer than many a call."""
EFFORT = 1
"""Of the compiler, up to 3: with more, the code takes as long, whatever the size of the problem."""


def loaded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as machine code. Other threads go on while it runs. Raises TypeError for what ``translation`` refuses."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple().create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=EFFORT)
    module = llvm.parse_assembly(f"{translated(function)}\n{entry(function)}")
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=EFFORT))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("entry"))

    arguments, kind = signature(function)
    taken = leaves(tuple(arguments.values()))
    dtypes = [np.dtype(ENTRY[leaf]) if leaf in ENTRY else None for leaf in taken]
    pack = struct.Struct("".join({float: "d", bool: "?7x"}.get(leaf, "q") for leaf in taken)).pack_into
    unpack = struct.Struct("".join({float: "d", bool: "?7x"}.get(leaf, "q") for leaf in leaves(kind))).unpack_from
    room = ctypes.c_int64 * max(len(taken), len(leaves(kind)))

    def call(*values: Any) -> Any:
        flat: list[Any] = []
        for value in values:
            _spread(value, flat) if isinstance(value, tuple) else flat.append(value)
        for place, dtype in enumerate(dtypes):
            if dtype is not None:
                array = flat[place]
                if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
                    raise TypeError(f"{symbol(function)}: an array of {array.dtype} and shape {array.shape}, not {dtype} in a row")
                flat[place] = id(array)
        words = room()
        pack(words, 0, *flat)
        run(words)
        found = unpack(words)
        return found[0] if not isinstance(kind, tuple) else found or None

    call.engine = engine  # type: ignore[attr-defined]  # holds the code
    return call


def _spread(values: tuple[Any, ...], flat: list[Any]) -> None:
    """Adds what tuples, and those within them, consist of."""
    for value in values:
        _spread(value, flat) if isinstance(value, tuple) else flat.append(value)


def entry(function: Callable[..., Any]) -> str:
    """What Python calls: it is told where eight bytes for each argument lie, of an array the address of its object; results go there."""
    arguments, kind = signature(function)
    lines, given = [], []
    for place, leaf in enumerate(leaves(tuple(arguments.values()))):
        lines.append(f"%at{place} = getelementptr i64, ptr %words, i64 {place}")
        if leaf in ENTRY:
            lines.append(f"%array{place} = load ptr, ptr %at{place}")
            for name, offset in (("data", DATA), ("shape", SHAPE)):
                lines.append(f"%to.{name}{place} = getelementptr i8, ptr %array{place}, i64 {offset}")
                lines.append(f"%{name}{place} = load ptr, ptr %to.{name}{place}")
            lines.append(f"%length{place} = load i64, ptr %shape{place}")
            given.append(f"ptr %data{place}, i64 %length{place}")
        else:
            (word,) = types(leaf)
            lines.append(f"%word{place} = load {word}, ptr %at{place}")
            given.append(f"{word} %word{place}")
    lines.append(f"%found = call {together(kind)} @{symbol(function)}({', '.join(given)})")
    for place, word in enumerate(types(kind)):
        lines.append(f"%result{place} = extractvalue {together(kind)} %found, {place}")
        lines.append(f"%to{place} = getelementptr i64, ptr %words, i64 {place}")
        lines.append(f"store {word} %result{place}, ptr %to{place}")
    return "\n  ".join(["define void @entry(ptr %words) {", *lines, "ret void\n}"])
