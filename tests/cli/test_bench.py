"""The command: on a CPU it checks and says what it checks; what cannot work is refused before anything is allocated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from staticmoe.bench import check as checks
from staticmoe.bench.blocks import Candidate, staticmoe_block
from staticmoe.bench.measure import Sweep, with_shares
from staticmoe.cli import bench as command
from staticmoe.cli.app import app
from staticmoe.errors import ConfigError

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what it says without a GPU")
SIZES = ("--hidden", 64, "--intermediate", 32, "--experts", 6, "--top-k", 2, "--tokens", 40)


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@without_gpu
def test_the_check_runs_on_a_cpu_and_is_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "check.json"
    result = bench(*SIZES, "--check", "--main-grad", "--compiled", "--output", path)
    assert result.exit_code == 0, result.output
    assert re.search(r"[^\n\x20-\x7e]", result.output) is None
    for name in ("staticmoe", "grouped_mm", "staticmoe, main_grad"):
        for dtype in ("bfloat16", "float32"):
            assert f"check: {name}, {dtype} against fp64, H 64, I 32, E 4, K 2, 27 tokens" in result.output
    assert "40 calls of staticmoe give the same bits" in result.output and "check passed" in result.output
    assert "compiled, and held against fp64, on a GPU alone" in result.output
    written = json.loads(path.read_text())
    assert written["shape"] == {"hidden": 64, "intermediate": 32, "experts": 6, "top_k": 2}
    assert written["cases"] == [] and written["check"]["bitwise_equal_calls"] == 40
    errors = written["check"]["relative_errors"]
    assert len(errors) == 6 and all(0 < error < 1.2e-2 for found in errors.values() for error in found.values())
    # What is printed is what is written: the worse of both shapes.
    (printed,) = re.findall(r"y (\S+), .*allowed 1.2e-02", result.output)[:1]
    assert float(printed) == pytest.approx(errors["staticmoe, bfloat16"]["y"], rel=0.05)


@without_gpu
def test_a_wrong_block_ends_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = [Candidate("staticmoe", lambda _: lambda p: 1.1 * staticmoe_block(p))]
    monkeypatch.setattr(command, "candidates", lambda **options: wrong)
    path = tmp_path / "check.json"
    result = bench(*SIZES, "--check", "--output", path)
    assert result.exit_code == 1 and "natural: y is off by 0.1" in result.stderr and "nothing timed" in result.stderr
    assert "Traceback" not in result.output and "check passed" not in result.output and not path.exists()


@without_gpu
def test_a_peer_that_does_not_run_is_left_out_and_ours_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(p: object) -> torch.Tensor:
        try:
            raise NotImplementedError("no kernel\nfor this")
        except NotImplementedError as error:
            raise RuntimeError("could not be compiled") from error

    asked = [Candidate("grouped_mm", lambda _: broken), Candidate("staticmoe", lambda _: staticmoe_block)]
    monkeypatch.setattr(command, "candidates", lambda **options: asked)
    result = bench(*SIZES, "--check", "--output", tmp_path / "check.json")
    assert result.exit_code == 0, result.output
    left_out = json.loads((tmp_path / "check.json").read_text())["left_out"]
    assert left_out == {"grouped_mm": "does not run: NotImplementedError: no kernel"}
    monkeypatch.setattr(command, "candidates", lambda **options: [Candidate("staticmoe", lambda _: broken)])
    assert isinstance(bench(*SIZES, "--check").exception, RuntimeError)


@without_gpu
def test_without_a_gpu_there_is_the_check_alone() -> None:
    result = bench("--preset", "qwen3")
    assert result.exit_code == 1 and result.stderr.startswith("error: device: expected a GPU")
    assert "staticmoe bench --check" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SIZES, "--hidden", 100), "hidden: expected a multiple of 8, 16 bytes of bf16 or fp16; got 100: take 96"),
        ((*SIZES, "--intermediate", 3), "intermediate: expected a multiple of 8"),
        ((*SIZES, "--top-k", 7), "top_k: expected 1 to experts = 6; got 7"),
        (("--hidden", 64, "--experts", 4), "--intermediate, --top-k is missing"),
        (("--preset", "gpt"), "--preset: expected one of mixtral, deepseek, olmoe, qwen3; got 'gpt'"),
        (("--tokens", 0), "--tokens: expected at least 1; got 0"),
        (("--routing", "even"), "--routing: expected one of natural, zipf, one-hot; got 'even'"),
        (("--dtype", "fp8"), "--dtype: expected one of bf16, fp16; got 'fp8'"),
        (("--plot", "a.jpeg"), "--plot: expected a name that ends in .png; got a.jpeg"),
        (("--output", "/"), "--output: expected a file that can be written; got /"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_without_a_traceback(arguments: tuple[object, ...], message: str) -> None:
    result = bench(*arguments, "--check")
    assert result.exit_code == 1 and result.stderr.startswith("error: ")
    assert message in result.stderr and "Traceback" not in result.output


def test_a_preset_gives_what_is_not_given() -> None:
    assert command.shape_of(None, None, None, None, None) == ("qwen3", command.Shape(2048, 768, 128, 8))
    assert command.shape_of("mixtral", None, None, None, None) == ("mixtral", command.Shape(4096, 14336, 8, 2))
    assert command.shape_of("mixtral", None, None, 16, None) == ("own", command.Shape(4096, 14336, 16, 2))
    assert command.shape_of(None, 64, 32, 4, 1) == ("own", command.Shape(64, 32, 4, 1))


def test_memory_that_will_not_fit_is_refused_before_a_tensor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU that says how much is free, and nothing else: whatever asked it for more would fail otherwise."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 << 30, 80 << 30))
    monkeypatch.setattr(checks, "check", lambda *arguments: pytest.fail("a check before the refusal"))
    result = bench("--preset", "deepseek", "--tokens", 8192, "--tokens", 65536)
    assert result.exit_code == 1, result.output
    assert re.search(
        r"memory: expected at most the 24\.0 GiB that are free; H 7168, I 2048, E 64, K 8 with 65536 tokens takes "
        r"about \d\d\.\d GiB \(weights 5\.2, their gradients 5\.2, tokens and rows \d\d\.\d",
        result.stderr,
    ), result.stderr
    with pytest.raises(ConfigError):
        command.BenchOptions(name="own", shape=command.Shape(64, 32, 4, 1), tokens=(8, 0))


@without_gpu
def test_what_is_measured_is_shown_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole command with a made-up clock: what was asked for arrives, what was measured comes out."""
    swept: list[Sweep] = []

    def measured(sweep: Sweep, device: torch.device, *, say: object) -> list[dict[str, object]]:
        swept.append(sweep)
        times = {"ms": 2.0, "ms_range": [1.5, 2.5], "replays": 20, "tflops": 400.0}
        passes = {name: dict(times) for name in ("forward", "both")}
        row = {"tokens": 40, "routing": "zipf", "blocks": {"staticmoe": {**passes, "saved_gib": 0.0, "peak_gib": 0.0}}}
        return with_shares([{"shape": sweep.name, **row}], [790.0, 810.0])

    monkeypatch.setattr(command, "copy_rate", lambda device: 4.27)
    monkeypatch.setattr(command, "measure_sweep", measured)
    run = command.run

    def on_the_cpu(options: command.BenchOptions, device: torch.device, *rest: object, **more: bool) -> object:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        return run(options, torch.device("cpu"), *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "run", on_the_cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = bench(*SIZES, "--routing", "zipf", "--dtype", "fp16", "--output", tmp_path / "bench.json")
    assert result.exit_code == 0, result.output
    (sweep,) = swept
    assert (sweep.name, sweep.tokens, sweep.routings, sweep.dtype) == ("own", (40,), ("zipf",), torch.float16)
    assert sweep.shape == command.Shape(64, 32, 6, 2)
    assert [one.name for one in sweep.candidates] == ["staticmoe", "grouped_mm", "grouped_mm, eager"]
    (line,) = [line.split() for line in result.output.splitlines() if line.startswith("  staticmoe")]
    assert line == ["staticmoe", "2.000", "400", "2.000", "1.500-2.500", "400", "50.0%", "-", "0.00", "0.00"]
    assert "absent: SonicMoE (" in result.output and "grouped_mm compiled (not asked for: --compiled)" in result.output
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["cases"][0]["ceiling_tflops"] == [790.0, 810.0] and written["copy_tb_per_s"] == 4.27
    assert written["provenance"]["absent_peers"] == list(written["absent"])
    assert list(written["check"]["relative_errors"])[0] == "staticmoe, float16"


@without_gpu
def test_a_plot_without_matplotlib_names_the_extra_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rest of the measurement is made up: the message comes first, and no file is drawn."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "why_no_plot", lambda: "no plot: pip install 'staticmoe[report]'")
    monkeypatch.setattr(command, "run", lambda *arguments, **options: {"cases": []})
    result = bench("--output", tmp_path / "bench.json", "--plot", tmp_path / "bench.png")
    assert result.exit_code == 0, result.output
    assert "no plot: pip install 'staticmoe[report]'" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
