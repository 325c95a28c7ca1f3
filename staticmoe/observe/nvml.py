"""What NVML knows about the GPUs of this machine: facts for the files of a run, and samples while it goes on."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def gpu_facts() -> list[dict[str, Any]]:
    """Return name, driver and memory in bytes of each GPU; an empty list, and one log line, without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        log.info("nvidia-ml-py is not installed: no GPU facts")
        return []
    except Exception as error:  # NVML's own error type is known only where the import worked
        log.info("NVML does not answer (%s): no GPU facts", error)
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "driver": driver,
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
            }
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()


# Clocks that are low because nothing runs, or because somebody set them: neither is throttling.
_NOT_THROTTLED = 0x1 | 0x2


class GpuSampler:
    """Reads one GPU's power, memory, clock and throttling; opened once. Without NVML it gives nothing, and logs once.

    Args:
        uuid: of the GPU, as NVML spells it; not its index, which CUDA_VISIBLE_DEVICES changes.
    """

    def __init__(self, uuid: str) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except ImportError:
            log.info("nvidia-ml-py is not installed: no gpu/ metrics")
        except Exception as error:
            log.info("NVML does not know %s (%s): no gpu/ metrics", uuid, error)
            self.close()

    def sample(self) -> dict[str, float]:
        """The "gpu/" metrics now; empty once NVML has failed."""
        nvml = self._nvml
        if nvml is None:
            return {}
        try:
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
            return {
                "gpu/power_watts": nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000,
                "gpu/memory_used_bytes": nvml.nvmlDeviceGetMemoryInfo(self._handle).used,
                "gpu/sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM),
                "gpu/throttled": int(reasons & ~_NOT_THROTTLED != 0),
            }
        except Exception as error:
            log.warning("NVML failed (%s): no more gpu/ metrics", error)
            self.close()
            return {}

    def close(self) -> None:
        """Let go of NVML; a second call does nothing."""
        nvml, self._nvml = self._nvml, None
        if nvml is None:
            return
        try:
            nvml.nvmlShutdown()
        except Exception as error:
            log.info("NVML does not shut down: %s", error)
