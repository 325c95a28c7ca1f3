"""Where the time of a replay goes: records a run, reads what was recorded, says it in numbers. Standard library only.

    commands     what to record; command lines of nsys
    tools        finds nsys and its importer, runs them
    collect      records a program into files that are whole
    nsys, kineto readers of nsys' SQLite and of torch.profiler's trace; `read` picks one
    timeline     what they read: kernels, copies, calls, ranges, graph nodes
    attribution  the phase of every kernel
    window       the iterations that are measured
    host         waits, launches, gaps
    metrics      all of it as an `Analysis` (`result`)
    compare      two of them
    trace, plot  a Chrome trace with phases; a picture of one iteration

`staticmoe profile` calls it.
"""

from staticmoe.profiling.compare import compare
from staticmoe.profiling.errors import ProfileError
from staticmoe.profiling.metrics import Shapes, analyse, analyse_processes
from staticmoe.profiling.read import read_profile
from staticmoe.profiling.result import Analysis

__all__ = ["Analysis", "ProfileError", "Shapes", "analyse", "analyse_processes", "compare", "read_profile"]
