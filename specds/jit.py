"""Typed doors to numba: one decorator for every compiled function, and a cache hint."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

# Widens array entries before arithmetic, which in uint16 would wrap; typed as what it is once compiled.
int64 = cast(Callable[[Any], int], np.int64)


def compiled(function: F) -> F:
    """Compile `function` on its first call, keep the machine code on disk, and release the GIL while it runs."""
    return cast(F, numba.njit(cache=True, nogil=True)(function))


def compiled_inside(function: F) -> F:
    """The same for functions that compiled ones call often: no references are counted, which costs more than they do.

    Such a function makes no array and returns none, slices included; the first is refused, the second is not.
    """
    return cast(F, numba.njit(cache=True, nogil=True, _nrt=False)(function))


def compiled_loosely(function: F) -> F:
    """The same with sums and maxima in any order, so that they run many numbers at a time.

    For what drafts are chosen by, never for what a text depends on. NaN is not expected.
    """
    return cast(F, numba.njit(cache=True, nogil=True, fastmath=True)(function))


_BYTE_POINTER = ir.PointerType(ir.IntType(8))


def _hint(builder: Any, address: Any) -> None:
    flag = ir.IntType(32)
    hint = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, flag, flag, flag]),
        "llvm.prefetch.p0",
    )
    # read, keep in every level, data cache
    builder.call(hint, [address, flag(0), flag(3), flag(1)])


def _prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]`. A hint: an index outside the array is harmless."""
    if not (isinstance(array, types.Array) and array.ndim == 1 and isinstance(index, types.Integer)):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        offset = context.cast(builder, args[1], signature.args[1], types.intp)
        _hint(builder, builder.bitcast(builder.gep(view.data, [offset]), _BYTE_POINTER))
        return context.get_dummy_value()

    return types.void(array, index), codegen


def _prefetch_address(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line of an address. A hint: any address is harmless."""
    if not isinstance(address, types.Integer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = context.cast(builder, args[0], signature.args[0], types.intp)
        _hint(builder, builder.inttoptr(where, _BYTE_POINTER))
        return context.get_dummy_value()

    return types.void(address), codegen


prefetch = cast(Callable[[Any, Any], None], intrinsic(_prefetch))
prefetch_address = cast(Callable[[int], None], intrinsic(_prefetch_address))


def _loader(bits: int, signed: bool) -> Any:
    """An integer at an address, widened to int64. Nothing checks the address."""

    def load(typingctx: Any, address: Any) -> Any:
        if not isinstance(address, types.Integer):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            where = context.cast(builder, args[0], signature.args[0], types.intp)
            pointer = builder.inttoptr(where, ir.PointerType(ir.IntType(bits)))
            value = builder.load(pointer, align=1)
            word = ir.IntType(64)
            if bits == 64:
                return value
            return builder.sext(value, word) if signed else builder.zext(value, word)

        return types.int64(address), codegen

    return load


load_uint16 = cast(Callable[[int], int], intrinsic(_loader(16, False)))
load_uint32 = cast(Callable[[int], int], intrinsic(_loader(32, False)))
load_int32 = cast(Callable[[int], int], intrinsic(_loader(32, True)))
load_int64 = cast(Callable[[int], int], intrinsic(_loader(64, True)))
