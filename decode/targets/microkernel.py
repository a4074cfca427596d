"""The one inner loop of the CPU runtime: a few rows times a panel of sixteen columns, in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
"""Columns of a panel. The same on every machine, so that the order of every sum is."""


def _rows_in_registers() -> int:
    """Rows whose accumulators fit into the vector registers beside a panel's row and a broadcast."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 12  # of 32 registers of 16 numbers
    return 6  # 12 of 16 registers of 8 (AVX2), 24 of 32 of 4 (NEON)


ROWS = _rows_in_registers()
"""Most rows of one call."""

_F32 = ir.FloatType()
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_BYTES = ir.PointerType(ir.IntType(8))
# Lines of a panel that are fetched ahead of the sums.
_AHEAD = 16
_POINTER: Any = types.CPointer(types.float32)  # type: ignore[attr-defined, unused-ignore]


def _emit_product(
    builder: Any, rows: int, panel: Any, x: Any, x_stride: Any, depth: Any, out: Any, stride: Any
) -> None:
    """The loop for a number of rows known now, so that every sum has a register of its own."""
    vectors = _VECTOR.as_pointer()
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    # LLVM keeps these in registers: their address is never taken.
    sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows)]
    starts = [builder.gep(x, [builder.mul(x_stride, _I64(row))]) for row in range(rows)]
    for one in sums:
        builder.store(zero, one)
    hint = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [_BYTES, *[ir.IntType(32)] * 3]), "llvm.prefetch.p0"
    )
    with cgutils.for_range(builder, depth) as loop:
        if rows > 1:  # one row is bound by memory alone, and the processor's own prefetching serves it best
            later = builder.gep(panel, [builder.mul(builder.add(loop.index, _I64(_AHEAD)), _I64(LANES))])
            builder.call(hint, [builder.bitcast(later, _BYTES), *map(ir.IntType(32), (0, 3, 1))])
        line = builder.load(builder.bitcast(builder.gep(panel, [builder.mul(loop.index, _I64(LANES))]), vectors))
        line.align = 4
        for one, start in zip(sums, starts, strict=True):
            number = builder.load(builder.gep(start, [loop.index]))
            lowest = builder.insert_element(undefined, number, ir.IntType(32)(0))
            spread = builder.shuffle_vector(lowest, undefined, everywhere)
            builder.store(builder.call(fma, [spread, line, builder.load(one)]), one)
    for row, one in enumerate(sums):
        place = builder.gep(out, [builder.mul(stride, _I64(row))])
        builder.store(builder.load(one), builder.bitcast(place, vectors)).align = 4


def _product(
    typingctx: Any, rows: Any, panel: Any, x: Any, x_stride: Any, depth: Any, out: Any, out_stride: Any
) -> Any:
    """out[r, j] = Σ_k x[r, k] · panel[k, j] for r < rows ≤ ROWS, j < LANES; k strictly in order, fused multiply-adds.

    The sum of an output is the same number whatever the other rows are and however many: that is what makes a
    drafted text equal to the plain one bit by bit.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, *rest = args
        done = builder.append_basic_block("product.done")
        choice = builder.switch(rows, done)
        for count in range(1, ROWS + 1):
            block = builder.append_basic_block(f"product.{count}")
            choice.add_case(_I64(count), block)
            builder.position_at_end(block)
            _emit_product(builder, count, *rest)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.intp, _POINTER, _POINTER, types.intp, types.intp, _POINTER, types.intp), codegen


def _address(typingctx: Any, array: Any, index: Any) -> Any:
    """The address of `array[index]`; nothing is checked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.gep(view.data, [args[1]])

    return _POINTER(array, types.intp), codegen


def _ahead(typingctx: Any, pointer: Any, count: Any) -> Any:
    """The address `count` numbers behind another."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return _POINTER(_POINTER, types.intp), codegen


def _float_of_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen


def _add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Atomically add to `array[index]` (int64), seen by all threads before what follows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", builder.gep(view.data, [args[1]]), args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


def _peek(typingctx: Any, array: Any, index: Any) -> Any:
    """Atomically read `array[index]` (int64), before whatever follows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.load_atomic(builder.gep(view.data, [args[1]]), "seq_cst", 8)

    return types.int64(array, types.intp), codegen


def _give_way(typingctx: Any) -> Any:
    """Let another thread have this core: sched_yield."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


product = cast(Callable[[int, Any, Any, int, int, Any, int], None], intrinsic(_product))
address = cast(Callable[[Any, int], Any], intrinsic(_address))
ahead = cast(Callable[[Any, int], Any], intrinsic(_ahead))
float_of_bits = cast(Callable[[int], float], intrinsic(_float_of_bits))
atomic_add = cast(Callable[[Any, int, int], int], intrinsic(_add))
atomic_read = cast(Callable[[Any, int], int], intrinsic(_peek))
give_way = cast(Callable[[], None], intrinsic(_give_way))
