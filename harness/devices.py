"""Opens the device that --device names."""

from __future__ import annotations

from kernels.lift import KernelsFile
from port.device import Device, DeviceError


def open_device(name: str, kernels: KernelsFile) -> Device:
    """ "host", or "auto", which is the host. Raises DeviceError for a device that is not there."""
    if name == "cuda":
        raise DeviceError("--device must be host (got cuda, which is not built yet); use host")
    from port.host_device import HostDevice

    return HostDevice(kernels)
