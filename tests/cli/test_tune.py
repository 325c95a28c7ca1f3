"""The command: a table that fits, a recommendation to copy, files, and words where a recording cannot be used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from staticmoe import RunnerConfig
from staticmoe.cli.app import _Commands
from staticmoe.cli.tune import tune as command
from staticmoe.errors import ConfigError
from staticmoe.tune import Judge, calibrate, load_config, read_run
from staticmoe.tune.render import labels, percent

app = typer.Typer(cls=_Commands, rich_markup_mode=None)
app.command("tune")(command)


@app.callback()
def _root() -> None:
    """A group, as the whole command line is one."""


LONG = [f"model.language_model.layers.{n}.mlp.experts" for n in (3, 12)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "run")


def write(folder: Path, *, steps: int = 240, experts: int = 8, **meta: Any) -> Path:
    """Two layers, one more skewed than the other, T·K = 256."""
    random = np.random.default_rng(0)
    popularity = [random.dirichlet(np.full(experts, 60.0)), random.dirichlet(np.full(experts, 20.0))]
    facts = {"num_experts": experts, "top_k": 2, "tokens": 128, "capacity_rows": 256, "can_overflow": 0}
    whole = {"schema": 2, "micro_batches": 1, "config": {"max_in_flight": 2}, **meta}
    (folder / "layers").mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({**whole, "participants": {name: facts for name in LONG}}))
    lines: list[dict[str, Any]] = [{"kind": "meta", "schema": 2}]
    for step in range(1, steps + 1):
        drawn = [random.multinomial(256, share).tolist() for share in popularity]
        layers = {name: {"routed": row, "kept": row} for name, row in zip(LONG, drawn, strict=True)}
        lines.append({"kind": "train", "step": step, "time": 0.0, "layers": layers})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "layers" / "experts.jsonl").write_text(text)
    return folder


def tune(*arguments: object, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["tune", *map(str, arguments)])


def table_of(output: str) -> list[list[str]]:
    """Cells of the lines that begin with a factor."""
    return [line.split() for line in output.splitlines() if re.match(r" {0,4}[0-9.]+ +[0-9]+ ", line)]


def test_a_table_of_80_columns_with_the_numbers_of_the_library(run: Path) -> None:
    result = tune(run, "--max-drop-rate", 0.01, "--factors", "2,1.25,1.5")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80 and re.search(r"[^\n\x20-\x7e]", result.output) is None
    judge = Judge(read_run(run))
    rows = table_of(result.output)
    assert [cells[:3] for cells in rows] == [["1.25", "256", "40"], ["1.5", "256", "48"], ["2", "256", "64"]]
    for cells, row in zip(rows, (judge.row(factor) for factor in (1.25, 1.5, 2.0)), strict=True):
        assert cells[3] == percent(row.drop.rate) and cells[-1] == f"{row.time:.2f}"
        assert cells[4] == f"[{percent(row.drop.low)},{percent(row.drop.high)}]"
        assert cells[-2] == f"[{percent(row.rerun.low, 2)},{percent(row.rerun.high, 2)}]"
    assert rows[0][5:7] == [percent(judge.row(1.25).worst_drop), "12"]
    assert "layers: model.language_model.layers.*.mlp.experts" in " ".join(result.output.split())
    assert "recommended: factor 1.5." in result.output
    assert "RunnerConfig(capacity_factor=1.5, capacity_scope='expert', overflow='drop')" in result.output
    assert "staticmoe train --capacity-factor 1.5 --capacity-scope expert --overflow drop" in result.output
    assert "no drift is seen: at factor 1.5" in result.output


def test_all_ranks_of_a_run_are_read_and_steps_are_skipped_on_each(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=2)
    write(folder / "rank1", steps=230)
    result = tune(folder, "--skip", 30, "--factors", "1.5")
    assert result.exit_code == 0, result.output
    assert "230 recorded steps of 2 ranks, the first 30 left out" in result.output
    assert "capacity scope expert, each of 2 ranks, 200 steps" in result.output
    assert "fewer than the 230 recorded steps; got 230" in tune(folder, "--skip", 230).stderr


def test_the_result_is_what_a_runner_takes(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tuned.json"
    result = tune(run, "--max-rerun-rate", 0.05, "--output", path)
    assert result.exit_code == 0 and f"result: {path}" in result.output
    config = load_config(path)
    assert RunnerConfig(**config).overflow == "rerun" and config["capacity_scope"] == "expert"
    written = json.loads(path.read_text())
    (table,) = written["tables"]
    row = Judge(read_run(run)).row(config["capacity_factor"])
    (found,) = [one for one in table["rows"] if one["factor"] == config["capacity_factor"]]
    assert found["rerun"] == {"rate": row.rerun.rate, "low": row.rerun.low, "high": row.rerun.high}
    assert found["rerun"]["high"] <= 0.05 and table["drift"]["drifted"] is False and table["steps"] == 240
    assert [path.name for path in path.parent.iterdir()] == ["tuned.json"]
    for text in ("{}", "[]", "{", '{"kind": "staticmoe.tune", "schema": 0}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="expected a file that `staticmoe tune RUN_DIR --output` has written"):
            load_config(path)


def test_ranks_have_a_table_each_and_what_cannot_be_is_left_out(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    result = tune(run, "--ep", "16,2,3,8", "--scope", "rank", "--max-rerun-rate", 0.1, "--output", path)
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.output.splitlines() if str(path) not in line) <= 80
    plain = " ".join(result.output.split())
    assert "EP 3 is left out: num_experts: expected a multiple of expert_parallel = 3; got 8" in plain
    assert "EP 16 is left out" in plain and "8 ranks, made of consecutive micro-batches, 30 steps" in plain
    tables = json.loads(path.read_text())["tables"]
    assert [(table["expert_parallel"], table["steps"]) for table in tables] == [(2, 120), (8, 30)]
    judge = Judge(read_run(run), "rank", 8)
    assert tables[1]["rows"][0]["drop"]["rate"] == judge.row(1.0).drop.rate > 0
    assert load_config(path)["capacity_factor"] == tables[0]["recommendation"]["capacity_factor"]
    none = tune(run, "--ep", "3,16")
    assert none.exit_code == 1 and "error: --ep: expected a number of ranks" in none.stderr


def test_a_rank_on_one_gpu_is_told_that_there_is_nothing_to_tune(run: Path) -> None:
    result = tune(run, "--scope", "rank")
    assert result.exit_code == 0 and "recommended: dropless. nothing to tune" in result.output
    assert "RunnerConfig(capacity_factor=None, capacity_scope='rank', overflow='rerun')" in result.output


def test_a_run_without_the_loads_of_its_experts_names_the_option(run: Path) -> None:
    (run / "layers" / "experts.jsonl").unlink()
    result = tune(run)
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and "experts_every=1" in result.stderr
    assert "Traceback" not in result.output


def test_sums_of_micro_batches_name_the_way_out(tmp_path: Path) -> None:
    result = tune(write(tmp_path / "sums", micro_batches=2))
    assert result.exit_code == 1
    assert f"record with gradient_accumulation_steps=1 or use {calibrate.__name__}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scope", "all"), "--scope: expected one of rank, expert; got 'all'"),
        (("--factors", "1,x"), "--factors: expected numbers above 0 with commas between them; got '1,x'"),
        (("--factors", "1,inf"), "--factors: expected numbers above 0"),
        (("--ep", "2,1.5"), "--ep: expected whole numbers above 0 with commas between them; got '2,1.5'"),
        (("--max-drop-rate", 2), "--max-drop-rate: expected a share between 0 and 1; got 2"),
        (("--max-drop-rate", 0.1, "--max-rerun-rate", 0.1), "expected one of them"),
        (("--plot", "a.jpg"), "--plot: expected a name that ends in .png; got a.jpg"),
    ],
)
def test_what_is_wrong_is_said(run: Path, arguments: tuple[object, ...], message: str) -> None:
    result = tune(run, *arguments)
    assert result.exit_code == 1 and message in result.stderr and "Traceback" not in result.output


def test_a_plot_is_drawn_or_names_the_extra(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    path = tmp_path / "tune.png"
    result = tune(run, "--plot", path)
    assert result.exit_code == 0 and path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = tune(run, "--plot", tmp_path / "other.png")
    assert missing.exit_code == 1 and "pip install 'staticmoe[report]'" in missing.stderr
    assert not (tmp_path / "other.png").exists()


def test_numbers_and_names_stay_short() -> None:
    shares = (0.0, 1e-9, 4.9e-6, 0.00123456, 0.0999996, 0.5, 0.99999, 1.0)
    wanted = ["0", "<0.001", "<0.001", "0.123", "10.00", "50.00", "100.00", "100"]
    assert [percent(share) for share in shares] == wanted
    assert labels(["a.0.b", "a.1.b"]) == ({"a.0.b": "0", "a.1.b": "1"}, "a.*.b")
    assert labels(["moe"]) == ({"moe": "all"}, "moe") and labels([""]) == ({"": "all"}, "(the model)")
    assert labels(["x.0", "x.0.y"])[0] == {"x.0": "~elf)", "x.0.y": "y"}
    assert labels(["decoder.10.f", "encoder.10.f"]) == ({"decoder.10.f": "~oder", "encoder.10.f": "~oder"}, "*.10.f")


def test_the_first_steps_can_be_left_out(run: Path) -> None:
    """The rates are those of the others; a number that leaves none is refused."""
    result = tune(run, "--skip", 100, "--factors", "1.25")
    assert result.exit_code == 0, result.output
    row = Judge(read_run(run).part(100, 240)).row(1.25)
    assert table_of(result.output)[0][3] == percent(row.drop.rate) and "the first 100 left out" in result.output
    assert row.drop != Judge(read_run(run)).row(1.25).drop
    refused = tune(run, "--skip", 240)
    assert refused.exit_code == 1 and "fewer than the 240 recorded steps; got 240" in " ".join(refused.stderr.split())
