"""`staticmoe bench`: the MoE block on your own shapes, beside its peers and the ceiling of the GPU.

Every block is first held against fp64, and calls of ours must repeat their bits; on red nothing is timed.

    staticmoe bench --hidden 2048 --intermediate 768 --experts 128 --top-k 8 --tokens 8192
    staticmoe bench --preset mixtral --tokens 8192 --tokens 32768 --routing zipf --output bench.json --plot bench.png
    staticmoe bench --preset olmoe --peers sonicmoe,liger
    staticmoe bench --check
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from staticmoe.bench import check as checks
from staticmoe.bench import needs
from staticmoe.bench.blocks import OURS, Candidate, absent, candidates, peer_candidates
from staticmoe.bench.measure import Sweep, first_cause, measure_sweep
from staticmoe.bench.peers import held, registry
from staticmoe.bench.plot import why_no_plot, write_plot
from staticmoe.bench.problems import ROUTINGS, SHAPES, Shape
from staticmoe.bench.result import provenance, source_commit, write_result
from staticmoe.bench.timing import clean, copy_rate
from staticmoe.cli.bench_report import BenchReport
from staticmoe.errors import ConfigError, SelfCheckError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OWN = "own"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What was asked for.

    Raises:
        ConfigError: a value that cannot work, with what was expected and the fix.
    """

    name: str
    shape: Shape
    tokens: tuple[int, ...] = (8192,)
    routings: tuple[str, ...] = ("natural",)
    dtype: str = "bf16"
    compiled: bool = False
    main_grad: bool = False
    peers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.tokens) < 1:
            raise ConfigError(f"--tokens: expected at least 1; got {min(self.tokens)}")
        for routing in self.routings:
            if routing not in ROUTINGS:
                raise ConfigError(f"--routing: expected one of {', '.join(ROUTINGS)}; got {routing!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)}; got {self.dtype!r}")


def shape_of(
    preset: str | None, hidden: int | None, intermediate: int | None, experts: int | None, top_k: int | None
) -> tuple[str, Shape]:
    """Name and shape: the four sizes, or a preset of which some may be replaced.

    Raises:
        ConfigError: an unknown preset, sizes that are missing without one, sizes that cannot work.
    """
    sizes = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k}
    given = {name: size for name, size in sizes.items() if size is not None}
    if preset is None and given:
        missing = [f"--{name.replace('_', '-')}" for name in sizes if name not in given]
        if missing:
            raise ConfigError(
                f"shape: expected --hidden, --intermediate, --experts and --top-k; {', '.join(missing)} is missing: "
                f"give it, or take the rest from --preset {'|'.join(SHAPES)}"
            )
    name = "qwen3" if preset is None else preset
    if name not in SHAPES:
        raise ConfigError(f"--preset: expected one of {', '.join(SHAPES)}; got {preset!r}")
    return OWN if given else name, Shape(**{**dataclasses.asdict(SHAPES[name]), **given})


def bench(
    hidden: Annotated[int | None, typer.Option(help="Width of a token.", show_default=False)] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width inside an expert.", show_default=False)] = None,
    experts: Annotated[int | None, typer.Option(help="Experts of this GPU.", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts a token.", show_default=False)] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of a call, repeatable; default: 8192.")] = None,
    routing: Annotated[
        list[str] | None, typer.Option(help="natural, zipf or one-hot, repeatable; default: natural.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(SHAPES)}; default without sizes: qwen3. Sizes replace those of it.", show_default=False
        ),
    ] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="grouped_mm by torch.compile as well.")] = False,
    main_grad: Annotated[
        bool, typer.Option("--main-grad", help="Ours with fp32 weight gradients added to buffers as well.")
    ] = False,
    peers: Annotated[
        str | None,
        typer.Option(
            help=f"Packages to compare: some of {','.join(registry.PEERS)}, or none; default: those that import.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check, and time nothing; runs on a CPU too.")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file to write.", show_default=False)] = None,
) -> None:
    """Time the MoE block on your own shapes, beside its peers and the ceiling of the GPU."""
    name, shape = shape_of(preset, hidden, intermediate, experts, top_k)
    options = BenchOptions(
        name=name,
        shape=shape,
        tokens=tuple(tokens or BenchOptions.tokens),
        routings=tuple(routing or BenchOptions.routings),
        dtype=dtype,
        compiled=compiled,
        main_grad=main_grad,
        peers=registry.asked_for(peers),
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not check:
        raise ConfigError(
            "device: expected a GPU to measure speeds on; torch sees none. Without one there is the check alone: "
            "staticmoe bench --check"
        )
    for option, path in (("--output", output), ("--plot", plot)):
        need_file(option, path)
    report = BenchReport(Console())
    missing = None if plot is None or check else why_no_plot()
    if missing:
        report.say(missing)
    try:
        result = run(options, device, report, only_check=check)
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"memory: expected the estimate to hold; got {first}: give fewer tokens or experts"
        ) from error
    if output is not None:
        write_result(result, output)
        report.say(f"result: {output}")
    if plot is not None and not check and not missing:
        write_plot(result, plot)
        report.say(f"plot: {plot}")


def need_file(option: str, path: Path | None) -> None:
    """Make the folder of a file that will be written, before anything is measured.

    Raises:
        ConfigError: nothing can be written there, or the plot has another ending than .png.
    """
    if path is None:
        return
    if option == "--plot" and path.suffix != ".png":
        raise ConfigError(f"--plot: expected a name that ends in .png; got {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: expected a file that can be written; got {path}: {error.strerror}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option}: expected a file that can be written; got {path}: a folder, or no permission")


def run(options: BenchOptions, device: torch.device, report: BenchReport, *, only_check: bool) -> dict[str, Any]:
    """Check, then measure and show; return the result."""
    dtype, on_gpu = DTYPES[options.dtype], device.type == "cuda"
    report.say(f"staticmoe bench: {options.shape}, {options.dtype}, on {device.type}")
    found = registry.find(options.peers)
    if on_gpu:
        refuse_what_does_not_fit(options, device, report, converted=found.converts)
    else:
        # The products of a check are so small that a second thread mostly waits, and on a busy machine it waits long.
        torch.set_num_threads(1)
        if options.compiled:
            report.say("grouped_mm is compiled, and held against fp64, on a GPU alone")
    asked = candidates(main_grad=options.main_grad, eager=True, compile_peer=options.compiled and on_gpu)
    asked += peer_candidates(found)
    errors, left_out = check_blocks(options, asked, device, report)
    missing = absent(options.compiled, found.absent)
    result: dict[str, Any] = {
        "provenance": provenance(device, source_commit(), list(missing)),
        "absent": missing,
        "left_out": left_out,
        "peers": found.notes,
        "shape": dataclasses.asdict(options.shape),
        "dtype": options.dtype,
        "check": {
            "relative_errors": errors,
            "allowed": {"blocks": checks.TOLERANCE[dtype], "peers": held.PEER_TOLERANCE[dtype]},
            "bitwise_equal_calls": check_calls(options, device, report),
        },
        "cases": [],
    }
    if only_check:
        report.say("check passed")
        return result
    report.say("copy of 2 GiB")
    result["copy_tb_per_s"] = copy_rate(device)
    clean(device)
    sweep = Sweep(
        name=options.name,
        shape=options.shape,
        tokens=options.tokens,
        routings=options.routings,
        dtype=dtype,
        candidates=[one for one in asked if not {one.name, one.package} & left_out.keys()],
    )
    result["cases"] = measure_sweep(sweep, device, say=report.say)
    report.show(result)
    return result


def refuse_what_does_not_fit(
    options: BenchOptions, device: torch.device, report: BenchReport, *, converted: bool
) -> None:
    """Say what it takes.

    Raises:
        ConfigError: more than is free.
    """
    free = torch.cuda.mem_get_info(device)[0]
    needed = needs.refuse_what_does_not_fit(
        options.shape,
        list(options.tokens),
        DTYPES[options.dtype],
        free,
        main_grad=options.main_grad,
        converted=converted,
    )
    report.say(f"memory: about {needed / needs.GIB:.1f} GiB of {free / needs.GIB:.1f} GiB that are free")


def check_blocks(
    options: BenchOptions, asked: list[Candidate], device: torch.device, report: BenchReport
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Hold every block against fp64, on widths that no tile divides and on the user's; packages on the user's alone.

    Returns the largest relative errors by block and dtype, and what cannot run here or is wrong, with the reason.

    Raises:
        SelfCheckError: at the first result that is wrong, but for those of a package.
    """
    on_gpu, dtype = device.type == "cuda", DTYPES[options.dtype]
    tokens, own = checks.reduced(options.shape, max(options.tokens), device)
    if on_gpu:
        own = needs.checkable(own, tokens, dtype.itemsize, torch.cuda.mem_get_info(device)[0])
    errors: dict[str, dict[str, float]] = {}
    left_out: dict[str, str] = {}
    # On a CPU the ops are plain PyTorch in every dtype. Captured or not, a block is the same.
    for candidate in (one for one in asked if one.captured and not one.package):
        for used in [dtype] if on_gpu else [dtype, torch.float32]:
            name, found = f"{candidate.name}, {used}".replace("torch.", ""), []
            try:
                for case in (checks.CHECKED[device.type], (tokens, own)):
                    report.say(f"check: {name} against fp64, {case[1]}, {case[0]} tokens")
                    found.append(checks.check(candidate.make, used, device, case))
                    clean(device)
            except (SelfCheckError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a peer that does not compile or run is a finding, not the end
                if candidate.name.startswith(OURS):
                    raise
                left_out[candidate.name] = f"does not run: {first_cause(error)}"
                report.say(f"{candidate.name} is left out, it {left_out[candidate.name]}")
                break
            errors[name] = {key: max(one[key] for one in found) for key in checks.NAMES}
            report.errors(errors[name], checks.TOLERANCE[used])
    found_of, why = held.hold_all(asked, dtype, device, (tokens, own), say=report.say, show=report.errors)
    return {**errors, **found_of}, {**left_out, **why}


def check_calls(options: BenchOptions, device: torch.device, report: BenchReport) -> int:
    """Compare calls of ours bit by bit, on the user's shape on a GPU; return their number.

    Raises:
        SelfCheckError: at the first that differs.
    """
    tokens, shape = min(options.tokens), options.shape
    if device.type != "cuda":
        tokens, shape = checks.reduced(shape, tokens, device)
    report.say(f"check: {checks.REPEATED} calls of {OURS} give the same bits, {shape}, {tokens} tokens")
    calls = checks.check_repeat(shape, tokens, DTYPES[options.dtype], device)
    clean(device)
    return calls
