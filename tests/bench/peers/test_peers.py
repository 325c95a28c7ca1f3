"""Other packages in the benchmark: made-up ones with the signatures of the real ones go through check, times and file.

A package that is wrong, raises or does not import is named, and the others go on.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from staticmoe.bench import blocks, check, measure, needs
from staticmoe.bench.peers import fbgemm, held, layout, liger, registry
from staticmoe.bench.problems import SHAPES, Problem, Shape, make_problem
from staticmoe.bench.result import write_result
from staticmoe.cli import bench as command
from staticmoe.cli.app import app
from staticmoe.cli.bench_report import notes
from staticmoe.errors import ConfigError, SelfCheckError

CPU, BF16 = torch.device("cpu"), torch.bfloat16
CASE = (37, Shape(16, 24, 8, 2))
NAMES = ["SonicMoE", "ScatterMoE", "FBGEMM-GenAI", "Liger"]
SIZES = ("--hidden", "64", "--intermediate", "32", "--experts", "6", "--top-k", "2", "--tokens", "40")
PROFILE = Path(__file__).resolve().parents[3] / "profiles" / "moe_block.py"


def entry_of(name: str) -> Callable[[Problem], blocks.Block]:
    (found,) = {one.make for one in blocks.peer_candidates(registry.find()) if one.package == name}
    return found


@pytest.mark.parametrize("case", [CASE, (37, Shape(24, 16, 8, 3))])
@pytest.mark.parametrize("name", NAMES)
def test_every_package_agrees_with_fp64(installed: dict[str, Any], name: str, case: tuple[int, Shape]) -> None:
    """Intermediates wider and narrower than hidden; one-hot routing leaves experts idle."""
    errors = held.hold(entry_of(name), BF16, CPU, case)
    assert list(errors) == ["y", "d_x", "d_topk_weights", "d_gate_up", "d_down"]
    assert all(0 < error < held.PEER_TOLERANCE[BF16] for error in errors.values())


def test_how_each_is_run_is_said(installed: dict[str, Any]) -> None:
    found = registry.find()
    assert [registry.PEERS[key].name for key in found.adapters] == NAMES and found.absent == {}
    assert found.notes["SonicMoE"].startswith("one fixed configuration: 128x256 cooperative") and found.converts
    assert found.notes["Liger"].startswith("one fixed configuration: its own of LIGER_FUSED_MOE_AUTOTUNE=0; uncaptured")
    shared = {"cluster_m": 2, "cluster_n": 1, "swap_ab": False, "is_dynamic_persistent": False}
    for name, width in {"gemm_tuned": 256, "gemm_gated_tuned": 256, "gemm_dgated_tuned": 128}.items():
        tile = {"tile_m": 128, "tile_n": width, "pingpong": width == 128}
        assert getattr(installed["quack.gemm_interface"], name).configs == [{"config": {**tile, **shared}}]
    assert str(installed["library"]).endswith("fbgemm_gpu/experimental/gen_ai/fbgemm_gpu_experimental_gen_ai.so")
    installed["liger_kernel.ops.fused_moe_kernels"]._AUTOTUNE_DISABLED = False
    assert registry.find(["liger"]).notes["Liger"].startswith("tuned by itself; uncaptured")


def test_ligers_tuner_is_off_unless_asked_for(installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    liger.load()
    assert os.environ[liger.TUNING] == "0"
    monkeypatch.setenv(liger.TUNING, "1")
    liger.load()
    assert os.environ[liger.TUNING] == "1"


def test_one_that_is_wrong_or_raises_is_named_and_the_others_go_on(spoiled: dict[str, Any]) -> None:
    said: list[str] = []
    shown: list[float] = []
    asked = blocks.peer_candidates(registry.find())
    errors, left_out = held.hold_all(
        asked, BF16, CPU, CASE, say=said.append, show=lambda errors, allowed: shown.append(allowed)
    )
    assert list(errors) == ["SonicMoE, bfloat16", "FBGEMM-GenAI, bfloat16"] and shown == [2e-2, 2e-2]
    assert (
        list(left_out) == ["ScatterMoE", "Liger"] and left_out["Liger"] == "does not run: RuntimeError: no kernel image"
    )
    assert left_out["ScatterMoE"].startswith("wrong: H 16, I 24, E 8, K 2, 37 tokens, natural: y is off by 0.")
    assert "allowed of a peer 0.02; not timed" in left_out["ScatterMoE"]
    # Captured and not, a package is checked once.
    assert [line for line in said if line.startswith("check: SonicMoE")] == [
        "check: SonicMoE against fp64, H 16, I 24, E 8, K 2, 37 tokens"
    ]
    assert f"Liger is left out: {left_out['Liger']}" in said


def test_a_gradient_of_an_idle_expert_is_refused() -> None:
    """Far below the tolerance of the norm: only the comparison with zero sees it."""

    def leaking(p: Problem) -> Tensor:
        down = p.down.view_as(p.down)
        down.register_hook(lambda grad: grad + 1e-7)
        return blocks.grouped_mm_block(dataclasses.replace(p, down=down))

    assert max(held.hold(lambda _: blocks.grouped_mm_block, BF16, CPU, CASE).values()) < held.PEER_TOLERANCE[BF16]
    with pytest.raises(SelfCheckError, match="one-hot: an expert without tokens has a weight gradient other than zero"):
        held.hold(lambda _: leaking, BF16, CPU, CASE)


def test_what_does_not_import_is_absent_with_the_reason(
    installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sonicmoe.functional", None)
    (tmp_path / "fbgemm_gpu" / fbgemm.LIBRARY).unlink()
    del installed["liger_kernel.ops.fused_moe"].LigerFusedMoEFunction
    found = registry.find()
    assert list(found.adapters) == ["scattermoe"] and not found.converts
    assert list(found.absent) == ["SonicMoE", "FBGEMM-GenAI", "Liger"]
    assert found.absent["SonicMoE"] == "import of sonicmoe.functional halted; None in sys.modules"
    assert found.absent["FBGEMM-GenAI"].startswith(f"expected {fbgemm.LIBRARY} in fbgemm_gpu; got none in")
    assert found.absent["Liger"].startswith("AttributeError: module 'liger_kernel.ops.fused_moe' has no attribute")
    gone = registry.find(["liger", "scattermoe"]).absent
    assert gone["SonicMoE"] == gone["FBGEMM-GenAI"] == "not asked for: --peers"
    monkeypatch.delitem(sys.modules, "scattermoe")
    assert registry.find().absent["ScatterMoE"] == "not installed"
    assert blocks.absent(False, {"A": "b"}) == {"A": "b", "grouped_mm compiled": "not asked for: --compiled"}


def test_what_is_asked_for() -> None:
    assert registry.asked_for(None) is None and registry.asked_for("none") == ()
    assert registry.asked_for("liger, sonicmoe,liger") == ("liger", "sonicmoe")
    assert registry.find(()).adapters == {} and list(registry.find(()).absent) == NAMES
    with pytest.raises(
        ConfigError, match="--peers: expected some of sonicmoe, scattermoe, fbgemm, liger, or none; got 'x'"
    ):
        registry.asked_for("liger,x")


def test_where_it_does_not_run_it_is_not_tried() -> None:
    asked = [blocks.Candidate("A, eager", lambda p: pytest.fail("made"), False, package="A", devices=("cuda",))]
    assert held.hold_all(asked, BF16, CPU, CASE) == ({}, {"A": "needs cuda; this is cpu"})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Both passes run once and take 2 ms; returns of every call whether it was captured."""
    log: list[bool] = []

    def milliseconds(call: Callable[[], object]) -> list[float]:
        call()
        return [2.0]

    def capture(call: Callable[[], object]) -> SimpleNamespace:
        log.append(True)
        return SimpleNamespace(replay=call)

    made_up = {"capture": capture, "milliseconds": milliseconds, "ceiling": lambda device, settle_s=0.3: 800.0}
    for name in ("why_not_captured", "memory"):
        made_up[name] = lambda *arguments, name=name: {"saved_gib": 0.0, "peak_gib": 0.0} if name == "memory" else None
    for name, call in made_up.items():
        monkeypatch.setattr(measure, name, call)
    return log


def sweep(candidates: list[blocks.Candidate]) -> measure.Sweep:
    return measure.Sweep(
        name="own", shape=Shape(16, 24, 4, 2), tokens=(5,), routings=("zipf",), dtype=BF16, candidates=candidates
    )


def test_they_are_timed_eager_and_captured_and_written(
    installed: dict[str, Any], clock: list[bool], tmp_path: Path
) -> None:
    found = registry.find()
    rows = measure.measure_sweep(sweep([*blocks.candidates(), *blocks.peer_candidates(found)]), CPU)
    result = {"cases": rows, "copy_tb_per_s": 4.0, "left_out": {}, "absent": {}, "peers": found.notes}
    write_result(result, tmp_path / "bench.json")
    written = json.loads((tmp_path / "bench.json").read_text())
    both = [name for package in NAMES[:3] for name in (package, f"{package}, eager")]
    assert list(written["cases"][0]["blocks"]) == ["staticmoe", "grouped_mm", *both, "Liger, eager"]
    # 18·5·2·16·24 operations in 2 ms.
    assert written["cases"][0]["blocks"]["SonicMoE"]["both"]["tflops"] == pytest.approx(69_120 / 2e9)
    # Ours, torch's and three packages, both passes.
    assert len(clock) == 10
    assert f"SonicMoE: {written['peers']['SonicMoE']}" in notes(written)


def test_one_that_fails_while_it_is_timed_is_named(spoiled: dict[str, Any], clock: list[bool]) -> None:
    asked = blocks.peer_candidates(registry.find(["liger", "fbgemm"]))
    (row,) = measure.measure_sweep(sweep([asked[-1], *asked[:-1]]), CPU)
    assert list(row["blocks"]) == ["FBGEMM-GenAI", "FBGEMM-GenAI, eager"]
    assert row["left_out"] == {"Liger, eager": "fails: RuntimeError: no kernel image"}
    with pytest.raises(RuntimeError, match="no kernel image"):
        measure.measure_sweep(sweep([dataclasses.replace(asked[-1], package="")]), CPU)


def test_the_command_checks_them_and_says_what_is_left_out(
    spoiled: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those of ours and torch's are held elsewhere.
    monkeypatch.setattr(check, "check", lambda *arguments: dict.fromkeys(check.NAMES, 1e-3))
    monkeypatch.setattr(check, "check_repeat", lambda *arguments: 40)
    path = tmp_path / "check.json"
    done = CliRunner().invoke(app, ["bench", *SIZES, "--check", "--output", str(path)])
    assert done.exit_code == 0, done.output
    written = json.loads(path.read_text())
    assert {"SonicMoE, bfloat16", "FBGEMM-GenAI, bfloat16"} < written["check"]["relative_errors"].keys()
    assert written["check"]["allowed"] == {"blocks": 1.2e-2, "peers": 2e-2}
    assert list(written["left_out"]) == ["ScatterMoE", "Liger"] and list(written["peers"]) == NAMES
    assert "Liger is left out: does not run: RuntimeError: no kernel image" in done.output
    done = CliRunner().invoke(app, ["bench", *SIZES, "--check", "--peers", "fbgemm", "--output", str(path)])
    written = json.loads(path.read_text())
    assert list(written["absent"].values())[:3] == ["not asked for: --peers"] * 3 and written["left_out"] == {}
    done = CliRunner().invoke(app, ["bench", *SIZES, "--check", "--peers", "megablocks"])
    assert done.exit_code == 1 and done.stderr.startswith("error: --peers: expected some of sonicmoe")
    # What was left out is not timed.
    swept: list[measure.Sweep] = []
    monkeypatch.setattr(command, "copy_rate", lambda device: 4.0)
    monkeypatch.setattr(command, "measure_sweep", lambda sweep, device, *, say: swept.append(sweep) or [])
    report = SimpleNamespace(say=lambda text: None, errors=lambda *numbers: None, show=lambda result: None)
    command.run(command.BenchOptions(name="own", shape=CASE[1], tokens=(9,)), CPU, report, only_check=False)
    assert {one.package for one in swept[0].candidates} == {"", "SonicMoE", "FBGEMM-GenAI"}


def test_the_profile_holds_them_on_every_shape(spoiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("moe_block", PROFILE)
    assert spec is not None and spec.loader is not None
    profile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(profile)
    swept: list[measure.Sweep] = []
    monkeypatch.setattr(profile, "measure_sweep", lambda sweep, device, *, after: swept.append(sweep) or [])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    options = SimpleNamespace(
        shapes=["qwen3"], tokens=[8192], routing=["zipf"], main_grad=False, eager=False, compiled=False, output=None
    )
    result: dict[str, Any] = {"check": {"peers": {}}, "left_out": {}, "cases": []}
    profile.run(options, registry.find(), CPU, result)
    assert list(result["left_out"]["qwen3"]) == ["ScatterMoE", "Liger"]
    assert list(result["check"]["peers"]["qwen3"]) == ["SonicMoE, bfloat16", "FBGEMM-GenAI, bfloat16"]
    names = ["SonicMoE", "SonicMoE, eager", "FBGEMM-GenAI", "FBGEMM-GenAI, eager"]
    assert [one.name for one in swept[0].candidates] == ["staticmoe", "grouped_mm", *names]


class _Held(layout.Converted):
    def __call__(self, p: Problem) -> Tensor:
        return p.x @ self.standing_for(p.gate_up)[0].T


def test_weights_of_its_own_order() -> None:
    ours = torch.arange(8.0).view(1, 4, 2)
    assert layout.interleaved(ours)[0, :, 0].tolist() == [0, 4, 2, 6]
    assert torch.equal(layout.concatenated(layout.interleaved(ours)), ours)
    p = make_problem(Shape(8, 16, 1, 1), 3, "natural", torch.float32, CPU)
    block = _Held(p)
    (got,) = torch.autograd.grad(block(p)[:, 1].sum(), p.gate_up)
    # The second of its rows is the first of up; the gradient stays in its order.
    assert torch.allclose(block(p)[:, 1], p.x @ p.gate_up[0, 16]) and torch.allclose(got[0, 1], p.x.sum(0))
    assert got[0].count_nonzero() == p.x.shape[1]


def test_they_are_no_memory_of_the_block_and_count_in_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory_allocated", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    p = make_problem(Shape(8, 16, 1, 1), 3, "natural", torch.float32, CPU)
    p = dataclasses.replace(p, grad=torch.ones(3, 32))
    monkeypatch.setattr(measure, "forward_backward", lambda block, p: None)
    assert measure.memory(_Held(p), p, CPU)["saved_gib"] == 0
    copied = layout.interleaved(p.gate_up.detach())
    assert measure.memory(lambda p: p.x @ copied[0].T, p, CPU)["saved_gib"] * 2**30 == copied.nbytes
    shape = SHAPES["qwen3"]
    plain, second = (needs.needed_bytes(shape, 8192, 2, converted=on)["weights"] for on in (False, True))
    assert (plain, second) == (6 * 128 * 2048 * 768, 10 * 128 * 2048 * 768)
    free = needs.refuse_what_does_not_fit(shape, [512, 32768], BF16, 80 * needs.GIB)
    with pytest.raises(ConfigError, match="memory"):
        needs.refuse_what_does_not_fit(shape, [512, 32768], BF16, free, converted=True)
