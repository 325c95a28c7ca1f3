"""What NVML knows about the GPUs of this machine, for the files of a run."""

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
