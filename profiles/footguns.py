"""Each footgun of `tests/footguns/` under `torch.cuda.graph` alone and under staticmoe: who catches it, and when.

    python profiles/footguns.py                    # the table in tests/footguns/README.md
    python profiles/footguns.py --short            # counted, as in the README
    python profiles/footguns.py --output footguns.json

Printed from `tests/footguns/declared.py`. What staticmoe does is held to by the tests named there. What the graph alone
does is not observed here: it is what the public reports of the row say, or follows from torch's documentation.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

DECLARED = Path(__file__).resolve().parents[1] / "tests/footguns/declared.py"


def declared() -> Any:
    """The module of declarations, which lies in no package."""
    spec = importlib.util.spec_from_file_location("footguns_declared", DECLARED)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table() -> list[str]:
    """One line for each footgun."""
    source = declared()
    lines = [
        "| row | what goes wrong | `torch.cuda.graph` alone (not observed) | reports of the row | staticmoe | test |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for one in source.FOOTGUNS:
        file, _, test = one.test.partition("::")
        cells = (one.row, one.wrong, source.RAW[one.raw], source.REPORTS[one.row], source.CAUGHT[one.caught])
        cells += (f"`{file}`: `{test}`",)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def short() -> list[str]:
    """Counts: a line for each way to be caught, a column for each thing that the graph alone does."""
    source = declared()
    kinds = [kind for kind in source.RAW if any(one.raw == kind for one in source.FOOTGUNS)]
    lines = [f"| staticmoe | of | {' | '.join(source.RAW[kind] for kind in kinds)} |"]
    lines.append("|---" * (2 + len(kinds)) + "|")
    for key, words in source.CAUGHT.items():
        mine = [one for one in source.FOOTGUNS if one.caught == key]
        counts = (str(sum(one.raw == kind for one in mine) or "-") for kind in kinds)
        lines.append(f"| {words} | {len(mine)} | {' | '.join(counts)} |")
    return lines


def main() -> None:
    """Print a table, and write all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="counts instead of one line for each")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    print("\n".join(short() if options.short else table()))
    if options.output is not None:
        source = declared()
        written = {
            "torch.cuda.graph": source.RAW,
            "reports": source.REPORTS,
            "staticmoe": source.CAUGHT,
            "footguns": [dataclasses.asdict(one) for one in source.FOOTGUNS],
        }
        options.output.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
