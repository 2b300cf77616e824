"""Opens the device that --device names."""

from __future__ import annotations

import sys

from kernels.lift import KernelsFile
from port.device import Device, DeviceError


def open_device(
    name: str, kernels: KernelsFile, graph: bool = False, races: bool = False
) -> Device:
    """ "host", "cuda", or "auto": cuda where a GPU answers, else host.

    graph: let CUDA graphs replay repeated calls. races: look for races, on the host only.
    Raises DeviceError for a device that is not there or lacks a piece; where "auto" finds a GPU but
    lacks a piece, standard error says so.
    """
    from port.cuda_device import CudaDevice, why_no_gpu

    if name == "cuda" or (name == "auto" and why_no_gpu() is None):
        try:
            device = CudaDevice(kernels)
        except DeviceError as error:
            if name == "cuda":
                raise
            print(f"using the CPU: {error}", file=sys.stderr)
        else:
            if not graph:
                return device
            from port.cuda_graph import GraphDevice

            return GraphDevice(device)
    if graph:
        raise DeviceError("--graph needs a GPU (got none); drop it")
    from port.host_device import HostDevice

    return HostDevice(kernels, races=races)
