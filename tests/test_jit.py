"""Compiled functions: what one means does not depend on who calls it first."""

from typing import Any

import numpy as np

from specds.jit import compiled, compiled_inside, compiled_loosely


@compiled
def strict(x: Any) -> Any:
    return x[0] * x[1] + x[2]


@compiled_inside
def strict_inside(x: Any) -> Any:
    return x[0] * x[1] - x[2]


@compiled_loosely
def loose(x: Any) -> Any:
    return strict(x) + strict_inside(x)


def test_strict_arithmetic_stays_strict_where_a_loose_function_calls_it_first() -> None:
    loose(np.ones(3))
    for function in (strict, strict_inside):
        (code,) = function.inspect_llvm().values()  # type: ignore[attr-defined]
        operations = [line for line in code.splitlines() if " fmul " in line or " fadd " in line or " fsub " in line]
        assert operations
        assert not any("fast" in line or "contract" in line or "reassoc" in line for line in operations)
