"""The README keeps its word: its example runs, its commands are the ones that are checked, its tree is the tree."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from staticmoe.cli.app import app
from staticmoe.integrations import huggingface

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_example_trains() -> None:
    code, _ = blocks("python")
    assert len(code.splitlines()) <= 30
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<example of the README>", "exec"), names)
    losses = [float(result.loss) for result in names["results"]]
    # Untrained: near the entropy of 64 symbols. 50 steps on one batch learn it.
    assert abs(losses[0] - math.log(64)) < 1.0
    assert losses[-1] < 0.5 * losses[0]
    # 4·32 tokens, 2 experts each, and every assignment is counted in every step.
    assert all(sum(result.moe["moe"].routed) == 256 for result in names["results"])
    # 8 experts of at most 48 rows each, and never more rows than assignments.
    assert names["results"][-1].moe["moe"].capacity_rows == min(256, 8 * 48)
    assert re.fullmatch(r"loss \d\.\d{3}, dropped \d+\.\d%\n", printed.getvalue())


def test_the_integration_calls_what_there_is() -> None:
    """Its model has to be loaded from somewhere, so that it is not executed here; tests/integrations does that."""
    _, code = blocks("python")
    called = re.findall(r"huggingface\.(\w+)", code)
    assert called == ["register", "check", "prepare", "causal_lm_loss"]
    guide = (ROOT / "staticmoe" / "integrations" / "README.md").read_text()
    called += re.findall(r"^\| `(\w+)\(", guide, flags=re.MULTILINE)
    assert len(called) == 8 and all(callable(getattr(huggingface, name)) for name in called)


def test_the_newcomers_commands_are_single_lines_and_one_of_them_is_what_ci_runs() -> None:
    commands = blocks("sh")
    assert [len(command.splitlines()) for command in commands[:2]] == [1, 1]
    train, test = (command.strip() for command in commands[:2])
    assert train.endswith("staticmoe train") and "-c constraints.txt -e '.[demo]'" in train
    assert test.endswith("python -m pytest -q -n auto") and "-c constraints.txt -e '.[test]'" in test
    assert "keeps it with `pip install -e '.[demo]'`, without the constraints" in TEXT
    offered = {line.split()[1] for line in commands[2].splitlines()}
    assert offered == {"monitor", "tune", "profile", "audit", "doctor"} <= {c.name for c in app.registered_commands}
    # .ci/run takes the newcomer's line from here by this pattern.
    (pattern,) = re.findall(r"grep -m1 -E '([^']*)' README.md", (ROOT / ".ci" / "run").read_text())
    assert re.findall(pattern, TEXT, flags=re.MULTILINE) and re.search(pattern, test)


def test_the_tree_is_true() -> None:
    tree = TEXT.split("## The tree")[1].split("## ")[0]
    top = re.findall(r"^    (\S+)", tree, flags=re.MULTILINE)
    inner = re.findall(r"^      (\S+)", tree, flags=re.MULTILINE)
    assert top[0] == "staticmoe/"
    missing = [name for name in top if not (ROOT / name).exists()]
    missing += [f"staticmoe/{name}" for name in inner if not (ROOT / "staticmoe" / name).exists()]
    assert missing == []
    rooms = {path.name for path in (ROOT / "staticmoe").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms - {name.rstrip("/") for name in inner} == set()


def test_it_is_short_and_says_each_version_once() -> None:
    assert len(TEXT.splitlines()) <= 250
    constraints = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==2\.13\.0$", constraints, flags=re.MULTILINE)
    assert "torch>=2.11" in (ROOT / "pyproject.toml").read_text() and "2.11 or newer" in TEXT


def test_its_numbers_are_those_of_the_results() -> None:
    """Every row of the table follows from the committed result, and so do the two speeds beside it."""
    folder = ROOT / "profiles" / "results" / "h200"
    result = json.loads((folder / "step_overhead.json").read_text())
    assert result["provenance"]["gpu"] and result["provenance"]["commit"] and result["ceiling_tflops"] > 0
    for name, entry in result["sizes"].items():
        assert entry["check"]["deterministic_gap"] == 0.0 and entry["passes_sync_debug_error"]
        eager, off, captured = (entry["modes"][mode] for mode in ("eager", "off", "cuda"))
        assert captured["host_syncs_per_step"] == {} and captured["device_allocations_in_steady_state"] == 0
        model = entry["model"]
        row = [
            f"{name}: {model['depth']} layers, width {model['hidden_size']}, {entry['tokens']} tokens",
            *(f"{mode['step_ms']:.1f}" for mode in (eager, off, captured)),
            f"{eager['gpu_idle_share']:.0%}",
            f"{captured['gpu_idle_share']:.0%}",
            f"{captured['host_us_of_a_lone_step'] / 1000:.1f}",
        ]
        assert f"| {' | '.join(row)} |" in TEXT
        gaps = [entry["check"][key] for key in ("gap_without_determinism", "noise_floor_of_two_uncaptured_runs")]
        assert all(f"{gap:.1e}".replace("e-0", "e-") in TEXT for gap in gaps if gap)
    for run in json.loads((folder / "train.json").read_text())["runs"].values():
        assert f"{run['tokens_per_second']:,.0f}" in TEXT


def test_the_card_of_families_is_what_was_found() -> None:
    cards = json.loads((ROOT / "profiles" / "results" / "cpu" / "families.json").read_text())["families"]
    assert f"All {len(cards)} families are captured" in TEXT and f"eager experts for {len(cards)} families" in TEXT
    assert {card["captured"] for card in cards.values()} == {"bitwise"}
    there = json.loads((ROOT / "profiles" / "results" / "h200" / "families.json").read_text())["families"]
    captured = [name for name, card in there.items() if "ms" in card["captured"]]
    assert set(there) == set(cards) and f"H200 the {len(captured)} of them" in TEXT


def test_the_block_is_where_the_table_says() -> None:
    """Every row of the block's table follows from the committed result, and so do the words about peers."""
    result = json.loads((ROOT / "profiles" / "results" / "h200" / "moe_block_peers.json").read_text())
    assert result["provenance"]["gpu"] and result["provenance"]["commit"] and result["check"]
    assert len(result["cases"]) == 8
    lead = {}
    for case in result["cases"]:
        blocks = [case["blocks"][name] for name in ("staticmoe", "SonicMoE", "grouped_mm")]
        row = [
            str(case["tokens"]),
            *(f"{block['both']['ms']:.2f} ({block['both']['share']:.0%})" for block in blocks),
            *(f"{block['forward']['tflops']:.0f}" for block in blocks),
            *(f"{block['saved_gib']:.2f}" for block in blocks),
        ]
        assert f" | {' | '.join(row)} |" in TEXT
        times = {name: block["both"]["ms"] for name, block in case["blocks"].items()}
        assert all(times["staticmoe"] < ms for name, ms in times.items() if name != "staticmoe" and "Sonic" not in name)
        lead[case["shape"], case["tokens"]] = times["staticmoe"] / times["SonicMoE"] - 1
    assert all(gap < 0 for (_, tokens), gap in lead.items() if tokens == 8192)
    large = [f"{100 * lead[shape, 32768]:.1f}" for shape in ("qwen3", "olmoe", "mixtral", "deepseek")]
    assert f"by {', '.join(large[:3])} and {large[3]}% on Qwen3, OLMoE, Mixtral and DeepSeek" in " ".join(TEXT.split())


def test_the_transformers_models_are_as_fast_as_the_table_says() -> None:
    result = json.loads((ROOT / "profiles" / "results" / "h200" / "transformers_models.json").read_text())
    again = {row["case"]: row for row in result["later"]}
    for name, case in result["cases"].items():
        modes = case["modes"]
        ours = modes["staticmoe"] if "ms" in modes["staticmoe"] else again[name]
        row = [modes.get(mode, {}).get("ms") for mode in ("eager", "grouped_mm", "grouped_mm_compiled")] + [ours["ms"]]
        row.append(modes.get("staticmoe_compiled", {}).get("ms"))
        assert f"| {' | '.join('-' if ms is None else f'{ms:.1f}' for ms in row)} |" in TEXT


def test_no_overflow_lost_anything() -> None:
    result = json.loads((ROOT / "profiles" / "results" / "h200" / "overflow.json").read_text())
    assert len(result["equality"]) == 8 and "in all eight cases" in TEXT
    for row in result["equality"].values():
        assert row["steps"] == 200 and row["lost"] == 0 and row["run_again"] > 0 and all(row["bitwise"].values())


def test_costs_and_memory_are_what_was_measured() -> None:
    folder = ROOT / "profiles" / "results" / "h200"
    sizes = json.loads((folder / "memory_snapshot.json").read_text())["sizes"]
    over = [size["reserved, most"] / size["forecast total"] - 1 for size in sizes.values()]
    text = " ".join(TEXT.split())
    assert f"in three sizes held {100 * min(over):.0f} to {max(over):.0%} more" in text and len(sizes) == 3
    costs = {
        row["size"]: row["over_dropless"]["rerun"]
        for row in json.loads((folder / "overflow_costs.json").read_text())["costs"]
    }
    assert f"the guard costs {costs['medium']:.1%} of a step (medium) and {costs['train']:.1%} (train" in text
    modes = json.loads((folder / "step_overhead_compiled.json").read_text())["sizes"]["train"]["modes"]
    assert f"train from {modes['cuda']['step_ms']:.2f} to {modes['cuda, compiled']['step_ms']:.2f} ms" in text


def test_what_the_tuner_said_is_what_was_dropped() -> None:
    """The forecast at the factor that was run, and the share that the run dropped: within bounds, and in the text."""
    result = json.loads((ROOT / "profiles" / "results" / "h200" / "tune.json").read_text())
    (row,) = [row for row in result["tables"]["all steps"]["rows"] if row["factor"] == 2.0]
    dropped = result["run at factor 2"]["drop_rate"]
    assert row["drop"]["low"] <= dropped <= row["drop"]["high"]
    assert f"said {row['drop']['rate']:.2%} at factor 2; run at that factor, {dropped:.2%} were dropped" in TEXT


def test_the_profile_tells_what_the_text_says() -> None:
    result = json.loads((ROOT / "profiles" / "results" / "h200" / "profile_train.json").read_text())
    assert result["provenance"]["commit"] and f"{1 - result['unattributed_share']:.2%} of kernel time told" in TEXT
    assert sum(wait["count"] for wait in result["waits"] if wait["where"] == "in step") == 0
    assert "no host waits in a step" in " ".join(TEXT.split())
    (traced,), (whole,) = (part["devices"] for part in (result, result["timing"]))
    assert result["nsys_stats"]["ns"] == result["nsys_stats"]["read_by_us"]["ns"]
    assert f"idle {whole['idle_share']:.1%} between whole replays, {traced['idle_share']:.1%} while" in TEXT


def test_the_run_that_is_monitored_and_tuned_is_the_one_of_the_text() -> None:
    """The page and the frame are of 1000 steps on an H200, at the factor that the tuner's run had, with its drops."""
    folder = ROOT / "profiles" / "results" / "h200"
    frame, page = (folder / "monitor.txt").read_text(), (folder / "monitor.html").read_text()
    assert (
        "On an H200, 1000 steps: `profiles/results/h200/monitor.html`" in TEXT and "For 1000 steps on an H200" in TEXT
    )
    assert "NVIDIA H200" in frame and "NVIDIA H200" in page and frame.splitlines()[1].startswith("step 1,000 ")
    tuned = json.loads((folder / "tune.json").read_text())
    assert "--steps 1000" in tuned["provenance"]["protocol"] and "factor 2" in frame
    # 32 x 256 tokens, two experts each, in four layers.
    assert tuned["run at factor 2"]["routed"] == 1000 * 4 * 32 * 256 * 2
    # A page stands alone: nothing is fetched from elsewhere.
    assert re.findall(r"(?:src|href)=.?https?://", page) == []


def test_the_footguns_are_counted_as_they_are_declared() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "profiles" / "footguns.py", "--short"], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() in TEXT
