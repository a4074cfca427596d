"""The inner loops of the CPU runtime, sixteen numbers at a time in registers; above all a few rows times a panel."""

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
        return 16  # of 32 registers of 16 numbers
    return 6  # 12 of 16 registers of 8 (AVX2), 24 of 32 of 4 (NEON)


ROWS = _rows_in_registers()
"""Most rows of one call."""

LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""e^x = 2^n e^r, r = x - n ln 2, ln 2 as a sum of two; (e^r - 1 - r) / r² as a polynomial in r, the highest power first
(Cephes)."""

_F32 = ir.FloatType()
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_BYTES = ir.PointerType(ir.IntType(8))
# How many lines of a panel ahead of the sums are fetched, and how near (3: into the first cache, 2: the second). Where
# sums keep pace with memory it must be beyond the next page, where processors do not look by themselves.
_FEW, _FEW_AHEAD, _AHEAD = 4, (16, 3), (128, 2)
_POINTER: Any = types.CPointer(types.float32)  # type: ignore[attr-defined, unused-ignore]


def _load(builder: Any, pointer: Any, index: Any) -> Any:
    line = builder.load(builder.bitcast(builder.gep(pointer, [index]), _VECTOR.as_pointer()))
    line.align = 4
    return line


def _store(builder: Any, line: Any, pointer: Any, index: Any) -> None:
    builder.store(line, builder.bitcast(builder.gep(pointer, [index]), _VECTOR.as_pointer())).align = 4


def _everywhere(builder: Any, number: Any) -> Any:
    """A number in every lane."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _emit_product(
    builder: Any, rows: int, panel: Any, x: Any, x_stride: Any, depth: Any, out: Any, stride: Any, carry: Any
) -> None:
    """The loop for a number of rows known now, so that every sum has a register of its own."""
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
    )
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    # LLVM keeps these in registers: their address is never taken.
    sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows)]
    starts = [builder.gep(x, [builder.mul(x_stride, _I64(row))]) for row in range(rows)]
    carries = builder.icmp_signed("!=", carry, _I64(0))
    for row, one in enumerate(sums):
        so_far = _load(builder, out, builder.mul(stride, _I64(row)))
        builder.store(builder.select(carries, so_far, zero), one)
    hint = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [_BYTES, *[ir.IntType(32)] * 3]), "llvm.prefetch.p0"
    )
    with cgutils.for_range(builder, depth) as loop:
        if rows > 1:  # one row is bound by memory alone, and the processor's own prefetching serves it best
            lines, cache = _FEW_AHEAD if rows <= _FEW else _AHEAD
            later = builder.gep(panel, [builder.mul(builder.add(loop.index, _I64(lines)), _I64(LANES))])
            builder.call(hint, [builder.bitcast(later, _BYTES), *map(ir.IntType(32), (0, cache, 1))])
        line = _load(builder, panel, builder.mul(loop.index, _I64(LANES)))
        for one, start in zip(sums, starts, strict=True):
            number = builder.load(builder.gep(start, [loop.index]))
            builder.store(builder.call(fma, [_everywhere(builder, number), line, builder.load(one)]), one)
    for row, one in enumerate(sums):
        _store(builder, builder.load(one), out, builder.mul(stride, _I64(row)))


def _product(
    typingctx: Any, rows: Any, panel: Any, x: Any, x_stride: Any, depth: Any, out: Any, out_stride: Any, carry: Any
) -> Any:
    """out[r, j] = Σ_k x[r, k] · panel[k, j] for r < rows ≤ ROWS, j < LANES; k strictly in order, fused multiply-adds.

    Unless `carry` is 0, the sum goes on from what out[r, j] is: a sum cut into parts is the same number.

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

    return types.void(types.intp, _POINTER, _POINTER, types.intp, types.intp, _POINTER, types.intp, types.intp), codegen


def _spread(number: float) -> Any:
    return ir.Constant(_VECTOR, [number] * LANES)


def _emit_exponential(builder: Any, x: Any) -> Any:
    """e^x of LANES numbers, each as `kernels.exponential` gives it, bit by bit."""
    whole_numbers = ir.VectorType(ir.IntType(32), LANES)
    lowest = _spread(-87.0)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)  # what is no number stays none
    floor = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR]), f"llvm.floor.v{LANES}f32"
    )
    whole = builder.call(floor, [builder.fadd(builder.fmul(x, _spread(LOG2_E)), _spread(0.5))])
    rest = builder.fsub(x, builder.fmul(whole, _spread(LN2_HIGH)))
    rest = builder.fsub(rest, builder.fmul(whole, _spread(LN2_LOW)))
    value = _spread(POLYNOMIAL[0])
    for term in POLYNOMIAL[1:]:
        value = builder.fadd(builder.fmul(value, rest), _spread(term))
    value = builder.fadd(builder.fadd(builder.fmul(builder.fmul(value, rest), rest), rest), _spread(1.0))
    bits = builder.add(builder.fptosi(whole, whole_numbers), ir.Constant(whole_numbers, [127] * LANES))
    power = builder.bitcast(builder.shl(bits, ir.Constant(whole_numbers, [23] * LANES)), _VECTOR)
    return builder.fmul(value, power)


def _gate(typingctx: Any, values: Any, out: Any) -> Any:
    """out = SiLU(values[:LANES]) · values[LANES : 2 · LANES]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, out = args
        value, other = _load(builder, values, _I64(0)), _load(builder, values, _I64(LANES))
        most = _spread(87.0)
        minus = builder.fsub(_spread(-0.0), value)
        minus = builder.select(builder.fcmp_ordered(">", minus, most), most, minus)
        below = builder.fadd(_spread(1.0), _emit_exponential(builder, minus))
        _store(builder, builder.fmul(builder.fdiv(value, below), other), out, _I64(0))
        return context.get_dummy_value()

    return types.void(_POINTER, _POINTER), codegen


def _exponentials(typingctx: Any, values: Any, blocks: Any, less: Any) -> Any:
    """values[i] = e^(values[i] - less) for i < blocks · LANES."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, blocks, less = args
        less = _everywhere(builder, less)
        with cgutils.for_range(builder, blocks) as loop:
            at = builder.mul(loop.index, _I64(LANES))
            line = builder.fsub(_load(builder, values, at), less)
            _store(builder, _emit_exponential(builder, line), values, at)
        return context.get_dummy_value()

    return types.void(_POINTER, types.intp, types.float32), codegen


def _largest(typingctx: Any, values: Any, blocks: Any) -> Any:
    """The largest of values[: blocks · LANES]; blocks ≥ 1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, blocks = args
        most = cgutils.alloca_once_value(builder, _load(builder, values, _I64(0)))
        builder.store(_load(builder, values, _I64(0)), most)
        with cgutils.for_range(builder, blocks) as loop:
            line, so_far = _load(builder, values, builder.mul(loop.index, _I64(LANES))), builder.load(most)
            builder.store(builder.select(builder.fcmp_ordered(">", line, so_far), line, so_far), most)
        lanes = builder.load(most)
        found = builder.extract_element(lanes, ir.IntType(32)(0))
        for lane in range(1, LANES):
            one = builder.extract_element(lanes, ir.IntType(32)(lane))
            found = builder.select(builder.fcmp_ordered(">", one, found), one, found)
        return found

    return types.float32(_POINTER, types.intp), codegen


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


product = cast(Callable[[int, Any, Any, int, int, Any, int, int], None], intrinsic(_product))
gate = cast(Callable[[Any, Any], None], intrinsic(_gate))
exponentials = cast(Callable[[Any, int, float], None], intrinsic(_exponentials))
largest = cast(Callable[[Any, int], float], intrinsic(_largest))
address = cast(Callable[[Any, int], Any], intrinsic(_address))
ahead = cast(Callable[[Any, int], Any], intrinsic(_ahead))
float_of_bits = cast(Callable[[int], float], intrinsic(_float_of_bits))
atomic_add = cast(Callable[[Any, int, int], int], intrinsic(_add))
atomic_read = cast(Callable[[Any, int], int], intrinsic(_peek))
give_way = cast(Callable[[], None], intrinsic(_give_way))
