"""What is known of a GPU and a model, and NVML on machines that have none: through a stand-in for its module."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch
from torch import nn

from staticmoe.observe.device import Probe, multiplying_weights, peak_flops
from staticmoe.observe.nvml import GpuSampler


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A1000", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_peak_is_known_or_null(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.positions, self.tokens = nn.Embedding(7, 4), nn.Embedding(10, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_multiply_count_once_and_lookups_do_not(tied: bool) -> None:
    assert multiplying_weights(Tied(tied=tied)) == 8 + 40


def test_a_frozen_matrix_makes_the_flops_unknown_and_a_frozen_vector_does_not() -> None:
    model = Tied(tied=False)
    model.norm.requires_grad_(False)
    model.positions.requires_grad_(False)
    assert multiplying_weights(model) == 48
    model.head.requires_grad_(False)
    assert multiplying_weights(model) is None


def test_a_cpu_tells_what_the_graphs_keep_and_nothing_of_a_gpu() -> None:
    kept = [5]
    probe = Probe(torch.device("cpu"), Tied(tied=True), lambda: kept[0])
    assert (probe.sample(), probe.peak_flops, probe.weights) == ({"memory/pool": 5}, None, 48)
    kept[0] = 6
    assert probe.sample() == {"memory/pool": 6}
    probe.close()


class FakeNvml(types.ModuleType):
    """One GPU of 300 W."""

    NVML_CLOCK_SM = 1

    def __init__(self, reasons: int = 0) -> None:
        super().__init__("pynvml")
        self.reasons, self.running, self.opened = reasons, 0, 0

    def nvmlInit(self) -> None:
        self.running, self.opened = self.running + 1, self.opened + 1

    def nvmlShutdown(self) -> None:
        self.running -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise RuntimeError("Not Found")
        return uuid

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if self.reasons < 0:
            raise RuntimeError("GPU is lost")
        return 300_500

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(used=12345)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1980 if kind == self.NVML_CLOCK_SM else 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons


def use(nvml: FakeNvml | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


# Nothing; idle; set clocks; power cap; heat, while idle.
@pytest.mark.parametrize(("reasons", "throttled"), [(0, 0), (0x1, 0), (0x2, 0), (0x4, 1), (0x41, 1)])
def test_nvml_is_opened_once_and_sampled_in_base_units(
    reasons: int, throttled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml(reasons)
    use(nvml, monkeypatch)
    sampler = GpuSampler("GPU-1")
    assert (
        sampler.sample()
        == sampler.sample()
        == {
            "gpu/power_watts": 300.5,
            "gpu/memory_used_bytes": 12345,
            "gpu/sm_clock_mhz": 1980,
            "gpu/throttled": throttled,
        }
    )
    assert (nvml.opened, nvml.running) == (1, 1)
    sampler.close()
    sampler.close()
    assert nvml.running == 0 and sampler.sample() == {}


@pytest.mark.parametrize(("uuid", "there"), [("GPU-1", False), ("GPU-2", True)])
def test_without_nvml_or_the_gpu_there_are_no_keys(
    uuid: str, there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = FakeNvml()
    use(nvml if there else None, monkeypatch)
    with caplog.at_level(logging.INFO, "staticmoe"):
        sampler = GpuSampler(uuid)
        assert [sampler.sample() for _ in range(3)] == [{}, {}, {}]
    assert len(caplog.records) == 1 and "no gpu/ metrics" in caplog.text
    assert nvml.running == 0


def test_nvml_that_fails_later_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = FakeNvml()
    use(nvml, monkeypatch)
    sampler = GpuSampler("GPU-1")
    assert len(sampler.sample()) == 4
    nvml.reasons = -1
    with caplog.at_level(logging.INFO, "staticmoe"):
        assert [sampler.sample() for _ in range(3)] == [{}, {}, {}]
    assert len(caplog.records) == 1 and "GPU is lost" in caplog.text and nvml.running == 0
