"""What the CPU runtime does to rows of numbers one at a time: norms, rotary embedding, softmax, sums.

Every sum runs in an order that depends on the row's own length alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32

from specds.decode.targets.microkernel import (
    LANES,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    POLYNOMIAL,
    address,
    exponentials,
    float_of_bits,
    largest,
)
from specds.jit import compiled, compiled_inside

LARGEST: Any = np.finfo(np.float32).max


@compiled
def exponential(x: float) -> float:
    """e^x for x ≤ 88, to two units in the last place; 0 far below."""
    x = max(x, float32(-87.0))
    whole = np.floor(x * float32(LOG2_E) + float32(0.5))
    rest = x - whole * float32(LN2_HIGH)
    rest = rest - whole * float32(LN2_LOW)
    value = float32(POLYNOMIAL[0])
    for term in POLYNOMIAL[1:]:
        value = value * rest + float32(term)
    value = value * rest * rest + rest + float32(1.0)
    power: float = value * float_of_bits((int32(whole) + int32(127)) << int32(23))
    return power


# Loops below run over slices from 0 on: an index that could be negative would keep LLVM from vectorising them.


@compiled
def normalise(x: Any, weights: Any, norm: int, epsilon: float, out: Any) -> None:
    """out = x / √(mean x² + ε) · weight, of one row (RMSNorm)."""
    width = len(x)
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    quarter = width // 4
    for column in range(quarter):
        one, two = float(x[column]), float(x[quarter + column])
        three, four = float(x[2 * quarter + column]), float(x[3 * quarter + column])
        a += one * one
        b += two * two
        c += three * three
        d += four * four
    for column in range(4 * quarter, width):
        a += float(x[column]) * float(x[column])
    factor = float32(1.0 / np.sqrt(((a + b) + (c + d)) / width + epsilon))
    weight = weights[norm : norm + width]
    for column in range(width):
        out[column] = weight[column] * (x[column] * factor)


@compiled
def rotate(x: Any, cosine: Any, sine: Any) -> None:
    """Rotary position embedding of one head in place; halves belong together, as in Llama."""
    half = len(x) // 2
    for column in range(half):
        low, high = x[column], x[half + column]
        x[column] = low * cosine[column] - high * sine[column]
        x[half + column] = high * cosine[half + column] + low * sine[half + column]


@compiled
def soften(scores: Any) -> None:
    """Softmax in place; the sum runs in four interleaved streams."""
    count = len(scores)
    blocks = count // LANES
    highest = largest(address(scores, 0), blocks) if blocks else scores[0]
    for key in range(blocks * LANES, count):
        highest = max(highest, scores[key])
    exponentials(address(scores, 0), blocks, highest)
    for key in range(blocks * LANES, count):
        scores[key] = exponential(scores[key] - highest)
    a, b, c, d = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    for key in range(0, count - 3, 4):
        a += scores[key]
        b += scores[key + 1]
        c += scores[key + 2]
        d += scores[key + 3]
    for key in range(count // 4 * 4, count):
        a += scores[key]
    factor = float32(1.0) / ((a + b) + (c + d))
    for key in range(count):
        scores[key] *= factor


@compiled
def add(x: Any, other: Any) -> None:
    """x += other."""
    for column in range(len(x)):
        x[column] += other[column]


@compiled
def add_panels(x: Any, other: Any, first: int, last: int, rows: int, stride: int) -> None:
    """x += other in panels first … last - 1 of every row."""
    for row in range(rows):
        low, high = row * stride + first * LANES, row * stride + last * LANES
        add(x[low:high], other[low:high])


@compiled_inside
def finite(number: float) -> float:
    """The number, or where it is infinite the largest of its sign; 0 for what is not a number."""
    bounded: float = min(max(number, -LARGEST), LARGEST)
    return bounded if number == number else float32(0.0)


@compiled_inside
def copy(source: Any, target: Any) -> None:
    """The numbers of one array into another that is as long."""
    for place in range(len(source)):
        target[place] = source[place]
