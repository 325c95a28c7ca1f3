"""How many bytes a measurement takes, before anything is allocated.

Dimensions: T tokens, K top_k, R = T·K rows, E experts, H hidden, I intermediate; b bytes of an element.
"""

from __future__ import annotations

import torch

from staticmoe.bench.problems import WIDTH_MULTIPLE, Shape
from staticmoe.errors import ConfigError

GIB = 1 << 30
# Above the allocations themselves: rounding and fragments of the allocator, the libraries' workspaces.
SLACK = 1.1
# Of the copy whose rate is measured: source and target.
COPY_BYTES = 4 * GIB
# fp64 copies of the weights, their gradients, what the loop's backward sums, and the differences.
ORACLE_BYTES = 8 * 5


def problem_bytes(shape: Shape, tokens: int, element: int) -> int:
    """Inputs, weights and the gradient of the output."""
    return 2 * tokens * shape.hidden * element + 8 * tokens * shape.top_k + shape.weights * element


def pass_bytes(shape: Shape, tokens: int, element: int) -> int:
    """Most that a block holds above its inputs in forward and backward: output, gradients, rows.

    At the end there are all gradients and R·b·(2H + 4I) of rows; before that R·b·(2H + 6I), while a third of the
    weights' gradients is still to come. The factors bound what was measured for ours and for the peer
    (`profiles/results/h200/moe_block.json`).
    """

    def rows(widths: int) -> int:
        return tokens * shape.top_k * (2 * shape.hidden + widths * shape.intermediate)

    most = max(shape.weights + rows(4), 2 * shape.weights // 3 + rows(6))
    return (2 * tokens * shape.hidden + most) * element


def oracle_bytes(shape: Shape, tokens: int, element: int) -> int:
    """Of a check against fp64."""
    rows = tokens * shape.top_k * (2 * shape.hidden + 6 * shape.intermediate)
    return problem_bytes(shape, tokens, element) + shape.weights * (element + ORACLE_BYTES) + 8 * rows


def checkable(shape: Shape, tokens: int, element: int, free: int) -> Shape:
    """The shape, its hidden width halved until a check against fp64 fits into `free` bytes."""
    while SLACK * oracle_bytes(shape, tokens, element) > free and shape.hidden >= 2 * WIDTH_MULTIPLE:
        halved = shape.hidden // (2 * WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        shape = Shape(halved, shape.intermediate, shape.experts, shape.top_k)
    return shape


def needed_bytes(
    shape: Shape, tokens: int, element: int, *, main_grad: bool = False, converted: bool = False
) -> dict[str, int]:
    """What the largest case holds at once, by what it is for; the sum is what must be free.

    `converted`: a peer holds gate and up, two thirds of the weights, in an order of its own as well.
    """
    buffers = 4 * shape.weights if main_grad else 0
    second = 2 * shape.weights // 3 * element if converted else 0
    return {
        "weights": shape.weights * element + second,
        "their gradients": shape.weights * element + buffers,
        "tokens and rows": (
            problem_bytes(shape, tokens, element) + pass_bytes(shape, tokens, element) - 2 * shape.weights * element
        ),
    }


def repeat_bytes(shape: Shape, tokens: int, element: int) -> int:
    """Of the comparison of calls: the first results, those of a graph, those of the call at hand."""
    results = (shape.weights + 2 * tokens * shape.hidden) * element
    return problem_bytes(shape, tokens, element) + results + 2 * pass_bytes(shape, tokens, element)


def refuse_what_does_not_fit(
    shape: Shape,
    tokens: list[int],
    dtype: torch.dtype,
    free: int,
    *,
    main_grad: bool = False,
    converted: bool = False,
) -> int:
    """Return the bytes that the check of repeated calls and the largest case take.

    Raises:
        ConfigError: more than `free`, with the numbers.
    """
    element = dtype.itemsize
    parts = needed_bytes(shape, max(tokens), element, main_grad=main_grad, converted=converted)
    repeated = repeat_bytes(shape, min(tokens), element)
    needed = int(SLACK * max(sum(parts.values()), repeated, COPY_BYTES))
    if needed > free:
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        raise ConfigError(
            f"memory: expected at most the {free / GIB:.1f} GiB that are free; {shape} with {max(tokens)} tokens takes "
            f"about {needed / GIB:.1f} GiB ({listed}; the check of repeated calls {repeated / GIB:.1f}): give fewer "
            "tokens, or the experts of one rank alone"
        )
    return needed
