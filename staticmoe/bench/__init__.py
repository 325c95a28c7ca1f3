"""Times the MoE block on given shapes beside its peers, and only what agrees with fp64 before.

    problems   widths, routings, inputs
    blocks     ours and the peers
    check      outputs and gradients against fp64, the same bits in every call
    needs      bytes, before anything is allocated
    timing     captured calls, their times, the ceilings of the device
    measure    memory and times of every block of a case
    result     provenance; result files
    plot       the picture

`staticmoe bench` and `profiles/moe_block.py` call it.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate.
"""

from staticmoe.bench.check import TOLERANCE
from staticmoe.bench.problems import SHAPES, Problem, Shape, make_problem
from staticmoe.bench.result import provenance

__all__ = ["SHAPES", "TOLERANCE", "Problem", "Shape", "make_problem", "provenance"]
