"""Whether a GPU is here, told without a library that could use it."""

from __future__ import annotations

from pathlib import Path

#: Any of these files: the NVIDIA driver is there.
DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")


def no_gpu() -> str | None:
    """One line if there is none."""
    if any(Path(file).exists() for file in DRIVER):
        return None
    return f"no NVIDIA GPU here: none of {', '.join(DRIVER)} exists"
