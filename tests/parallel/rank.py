"""One rank of the tests' process groups: calls functions of test files, one after another, as its standard input says.

Both streams carry pickles: (file, function, arguments, rank, ranks, store) comes in, (error text, result) goes out.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import pickle
import sys
import traceback
from types import ModuleType

import torch

# Here, because the first optimizer imports it, which takes as long as a test may.
import torch._dynamo  # noqa: F401
import torch.distributed as dist

# A rank that the others have left hears of it, and the next test does not have to.
_PATIENCE = datetime.timedelta(seconds=40)


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ranks_test_file", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "wb")
    # What a test prints is not part of the answer.
    os.dup2(2, 1)
    while True:
        try:
            file, function, arguments, rank, ranks, store = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=_PATIENCE)
        try:
            torch.manual_seed(0)
            answer = "", getattr(_load(file), function)(**arguments)
        except BaseException:
            answer = traceback.format_exc(), None
        if dist.is_initialized():
            dist.destroy_process_group()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
