"""What a scrape sees: exact totals, base units, evaluations apart, and a port that is free again afterwards."""

from __future__ import annotations

import builtins
import math
import os
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from staticmoe.errors import ClosedError, ConfigError
from staticmoe.observe.metrics import METRICS
from staticmoe.observe.sinks.prometheus import PrometheusSink

client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

Samples = dict[tuple[str, str], float]


def record(step: int, **entries: Any) -> dict[str, Any]:
    head = {"kind": "train", "step": step, "attempt": 0, "void": False, "skipped": False, "reasons": []}
    return {**head, "time": 1000.0 + step, **entries}


def parse(text: str) -> Samples:
    """(name, label values in order of the labels' names) -> value."""
    return {
        (sample.name, ",".join(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def scrape(port: int | None) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return parse(answer.read().decode())


def test_totals_are_exact_after_200_records() -> None:
    """Among 200 training steps some are skipped or run again; void attempts and evaluations lie between them."""
    expected: dict[str, int] = dict.fromkeys(("a", "b", "a dropped", "b dropped", "steps", "again", "loss", "both"), 0)
    with PrometheusSink(port=0) as sink:
        for step in range(1, 201):
            load = {
                "a": {"routed": [step, 3, 0], "dropped": [step % 2, 0, 0], "capacity_rows": 99, "required_factor": 1.0},
                "b": {"routed": [2**40, step], "dropped": [0, step], "capacity_rows": 99, "required_factor": None},
            }
            sink(record(step, void=True, attempt=1, moe=load, skipped=True, reasons=["capacity_overflow"]))
            sink(record(step, kind="eval", moe=load, **{"eval/loss": 1.0}))
            entries: dict[str, Any] = {"moe": load}
            if step % 10 == 0:
                reasons = ["nonfinite_loss"] if step % 20 else ["nonfinite_loss", "nonfinite_gradient"]
                entries |= {"skipped": True, "reasons": reasons}
                expected["loss" if step % 20 else "both"] += 1
            else:
                if step % 7 == 0:
                    entries |= {"attempt": 2, "reasons": ["capacity_overflow"]}
                    expected["again"] += 1
                expected["steps"] += 1
                expected["a"] += step + 3
                expected["b"] += 2**40 + step
                expected["a dropped"] += step % 2
                expected["b dropped"] += step
            sink(record(step, **entries))
        found = scrape(sink.port)
    assert expected["steps"] == 180 and expected["again"] == 26
    assert found[("staticmoe_assignments_routed_total", "a")] == expected["a"]
    assert found[("staticmoe_assignments_routed_total", "b")] == expected["b"]
    assert found[("staticmoe_assignments_dropped_total", "a")] == expected["a dropped"]
    assert found[("staticmoe_assignments_dropped_total", "b")] == expected["b dropped"]
    assert found[("staticmoe_steps_total", "")] == expected["steps"]
    named = {
        key: value for key, value in found.items() if key[0] in ("staticmoe_reruns_total", "staticmoe_skips_total")
    }
    assert named == {
        ("staticmoe_reruns_total", "capacity_overflow"): expected["again"],
        ("staticmoe_skips_total", "nonfinite_loss"): expected["loss"],
        ("staticmoe_skips_total", "nonfinite_loss+nonfinite_gradient"): expected["both"],
    }
    assert found[("staticmoe_last_step_timestamp_seconds", "")] == 1199.0


def test_a_skip_after_a_rerun_is_not_the_overflow_s() -> None:
    with PrometheusSink(port=0) as sink:
        sink(record(1, attempt=1, skipped=True, reasons=["capacity_overflow", "nonfinite_loss"]))
        sink(record(2, skipped=True, reasons=["capacity_overflow"]))
        sink(record(3, attempt=1, skipped=True, reasons=["capacity_overflow"]))
        sink(record(4, skipped=True, reasons=["capacity_overflow", "nonfinite_loss"]))
        found = scrape(sink.port)
    assert found[("staticmoe_reruns_total", "capacity_overflow")] == 2
    assert found[("staticmoe_skips_total", "nonfinite_loss")] == 1
    assert found[("staticmoe_skips_total", "capacity_overflow")] == 2
    assert found[("staticmoe_skips_total", "capacity_overflow+nonfinite_loss")] == 1


def test_gauges_are_the_registry_s_in_base_units() -> None:
    values = {
        "train/loss": 2.5, "moe/drop_rate": 0.125, "time/step_p50": 0.25, "throughput/tokens_per_s": 1000.0,
        "throughput/executed_tflops": 1.5, "memory/pool": 2**33, "gpu/power_watts": 650.0, "gpu/sm_clock_mhz": 1980,
        "gpu/throttled": True, "graph/reruns": 4, "user/accuracy": 0.5, "user/top-5": 0.75, "other/thing": 1.0,
    }  # fmt: skip
    with PrometheusSink(port=0) as sink:
        sink(record(3, **values))
        found = scrape(sink.port)
    build = {key for key in found if key[0] == "staticmoe_build_info"}
    counted = ("staticmoe_steps_total", "staticmoe_step_duration", "staticmoe_last_step")
    gauges = {key: value for key, value in found.items() if key not in build and not key[0].startswith(counted)}
    assert gauges == {
        ("staticmoe_train_loss", ""): 2.5,
        ("staticmoe_moe_drop_rate_ratio", ""): 0.125,
        ("staticmoe_time_step_p50_seconds", ""): 0.25,
        ("staticmoe_throughput_tokens_per_second", ""): 1000.0,
        ("staticmoe_throughput_executed_flops", ""): 1.5e12,
        ("staticmoe_memory_pool_bytes", ""): 2.0**33,
        ("staticmoe_gpu_power_watts", ""): 650.0,
        ("staticmoe_gpu_sm_clock_hertz", ""): 1.98e9,
        ("staticmoe_gpu_throttled", ""): 1.0,
        ("staticmoe_graph_reruns", ""): 4.0,
        ("staticmoe_user", "accuracy"): 0.5,
        ("staticmoe_user", "top-5"): 0.75,
    }
    assert len(build) == 1 and all(found[key] == 1 for key in build)


def test_every_metric_of_the_registry_has_a_gauge_of_its_own() -> None:
    registry = client.CollectorRegistry()
    with PrometheusSink(port=0, registry=registry) as sink:
        before = len(parse(client.generate_latest(registry).decode()))
        sink(record(1, skipped=True, reasons=["nonfinite_loss"], **{metric.name: 1.0 for metric in METRICS}))
        # The skip has a series too.
        assert len(parse(client.generate_latest(registry).decode())) == before + len(METRICS) + 1


def test_an_evaluation_has_gauges_of_its_own() -> None:
    with PrometheusSink(port=0) as sink:
        sink(record(1, **{"train/loss": 2.0, "moe/drop_rate": 0.25, "user/x": 1.0}))
        sink(record(1, kind="eval", **{"eval/loss": 3.0, "moe/drop_rate": 0.5, "user/x": 4.0}))
        sink(record(2, void=True, **{"train/loss": 9.0, "moe/drop_rate": 1.0}))
        found = scrape(sink.port)
    assert found[("staticmoe_train_loss", "")] == 2.0
    assert found[("staticmoe_eval_loss", "")] == 3.0
    assert found[("staticmoe_moe_drop_rate_ratio", "")] == 0.25
    assert found[("staticmoe_eval_moe_drop_rate_ratio", "")] == 0.5
    assert (found[("staticmoe_user", "x")], found[("staticmoe_eval_user", "x")]) == (1.0, 4.0)


def test_a_null_makes_a_gauge_nan_and_an_absent_metric_leaves_it() -> None:
    keys = {("staticmoe_train_loss", ""), ("staticmoe_memory_pool_bytes", ""), ("staticmoe_user", "x")}
    mfu = ("staticmoe_throughput_mfu_ratio", "")
    with PrometheusSink(port=0) as sink:
        sink(record(1, **{"throughput/mfu": None, "user/y": None}))
        assert not (keys | {mfu, ("staticmoe_user", "y")}) & scrape(sink.port).keys()
        sink(record(2, **{"train/loss": 2.0, "memory/pool": 5, "user/x": 1.0, "throughput/mfu": 0.5}))
        sink(record(3, **{"train/loss": None, "user/x": None, "throughput/mfu": 0.25}))
        found = scrape(sink.port)
    assert math.isnan(found[("staticmoe_train_loss", "")]) and math.isnan(found[("staticmoe_user", "x")])
    assert (found[("staticmoe_memory_pool_bytes", "")], found[mfu]) == (5.0, 0.25)


def test_step_durations_leave_out_what_is_no_step() -> None:
    """Steps 1 to 4 take 0.2 s; then an evaluation, a flush that reads two records at once, and a clock set back."""
    with PrometheusSink(port=0) as sink:
        for step in range(1, 5):
            sink(record(step, time=100 + 0.2 * step, **{"graph/record_lag": 1}))
        sink(record(4, kind="eval", time=150.0))
        sink(record(5, time=200.0, **{"graph/record_lag": 1}))
        sink(record(6, time=200.001, **{"graph/record_lag": 0}))
        sink(record(7, time=230.0, **{"graph/record_lag": 1}))
        sink(record(8, time=232.0, **{"graph/record_lag": 1}))
        sink(record(9, time=190.0, **{"graph/record_lag": 1}))
        sink(record(10, void=True, time=191.0))
        sink(record(10, attempt=1, time=192.0, reasons=["capacity_overflow"], **{"graph/record_lag": 1}))
        found = scrape(sink.port)
    assert found[("staticmoe_step_duration_seconds_count", "")] == 4
    assert found[("staticmoe_step_duration_seconds_sum", "")] == pytest.approx(3 * 0.2 + 2.0)
    assert found[("staticmoe_step_duration_seconds_bucket", "0.1")] == 0
    assert found[("staticmoe_step_duration_seconds_bucket", "0.25")] == 3
    assert found[("staticmoe_step_duration_seconds_bucket", "2.5")] == 4


def test_a_taken_port_is_refused_and_close_frees_it() -> None:
    first = PrometheusSink(port=0)
    assert first.port is not None
    registry = client.CollectorRegistry()
    with pytest.raises(ConfigError, match=f"127.0.0.1:{first.port}; got .*port=0 picks a free one"):
        PrometheusSink(port=first.port, registry=registry)
    # The failed one has left nothing behind in a registry that is not its own.
    assert client.generate_latest(registry) == b""
    first.close()
    first.close()
    with pytest.raises(ClosedError, match="PrometheusSink"):
        first(record(1))
    with PrometheusSink(port=first.port, registry=registry) as second:
        second(record(1))
        assert scrape(second.port)[("staticmoe_steps_total", "")] == 1
    assert client.generate_latest(registry) == b""
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", first.port)) != 0


@pytest.mark.parametrize(("port", "host"), [(70000, "127.0.0.1"), (0, "203.0.113.1")])
def test_an_address_that_cannot_be_served_is_refused(port: int, host: str) -> None:
    with pytest.raises(ConfigError, match=f"expected to serve on {host}:{port}; got .*an address of this machine"):
        PrometheusSink(port=port, host=host)


def test_a_registry_that_has_these_metrics_leaves_no_server_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []
    serve = client.start_http_server

    def start(*args: Any) -> Any:
        server, thread = serve(*args)
        ports.append(server.server_port)
        return server, thread

    monkeypatch.setattr(client, "start_http_server", start)
    registry = client.CollectorRegistry()
    client.Counter("staticmoe_steps", "Of somebody else.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        PrometheusSink(port=0, registry=registry)
    with socket.socket() as probe:
        assert len(ports) == 1 and probe.connect_ex(("127.0.0.1", ports[0])) != 0
    assert parse(client.generate_latest(registry).decode()) == {("staticmoe_steps_total", ""): 0}


def test_a_text_file_is_replaced_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now, replaced = tmp_path / "deep" / "run.prom", [50.0], list[Path]()
    replace = os.replace

    def counting(source: Path, target: Path) -> None:
        assert source != target and parse(source.read_text())
        replaced.append(Path(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", counting)
    sink = PrometheusSink(textfile=path, clock=lambda: now[0])
    assert sink.port is None
    seen = []
    for step, seconds in enumerate((50.0, 50.5, 50.99, 51.0, 51.9, 52.5), start=1):
        now[0] = seconds
        sink(record(step))
        seen.append(parse(path.read_text())[("staticmoe_steps_total", "")])
    assert seen == [1, 1, 1, 4, 4, 6]
    sink(record(7))
    sink.close()
    assert parse(path.read_text())[("staticmoe_steps_total", "")] == 7
    assert replaced == [path] * 4
    assert [entry.name for entry in path.parent.iterdir()] == ["run.prom"]


def test_a_text_file_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.prom"
    sink = PrometheusSink(textfile=path)
    sink(record(1))
    before = path.read_bytes()

    def full(source: object, target: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        sink.close()
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["run.prom"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "prometheus_client":
            raise ModuleNotFoundError("No module named 'prometheus_client'", name=name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"prometheus-client; got .*pip install 'staticmoe\[report\]'"):
        PrometheusSink(port=0)
