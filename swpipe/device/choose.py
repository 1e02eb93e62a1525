"""The choice of the device that a pipeline uses."""

from __future__ import annotations

import torch

from swpipe.device.accelerator import AcceleratorDevice
from swpipe.device.cpu import CpuDevice
from swpipe.device.protocol import Device


def resolve(device: Device | torch.device | str | int | None) -> Device:
    """Return the device that a pipeline uses; None is the machine's accelerator, or else the CPU.

    A number is an index of the accelerator's, from 0.

    Raises:
        ValueError: The device is neither the CPU nor one of this machine's accelerators, or torch
            offers no streams and events for it.
    """
    if type(device) is int:
        kind = torch.accelerator.current_accelerator(check_available=True)
        device = f"{kind.type if kind else 'cuda'}:{device}"
    if device is not None and not isinstance(device, str | torch.device):
        # bool is a subclass of int, and True would otherwise be device 1.
        if isinstance(device, int) or not hasattr(device, "has_streams"):
            raise ValueError(f"device is {device!r}: give a name such as 'cpu', or a torch.device")
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    wanted = accelerator or torch.device("cpu") if device is None else _torch_device(device)
    if wanted.type == "cpu":
        return CpuDevice()
    if accelerator is None or wanted.type != accelerator.type:
        have = accelerator.type if accelerator else "no accelerator"
        raise ValueError(
            f"device {str(wanted)!r} is not on this machine, which has {have}; give 'cpu'"
        )
    # A name without an index, "cuda", stands for the current device.
    count = torch.accelerator.device_count()
    if wanted.index is not None and wanted.index >= count:
        names = f"{wanted.type}:0" + (f" to {wanted.type}:{count - 1}" if count > 1 else "")
        raise ValueError(f"device {str(wanted)!r} is not on this machine, which has {names}")
    return AcceleratorDevice(wanted)


def _torch_device(device: torch.device | str) -> torch.device:
    """Return the torch device of a name."""
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device {device!r} is unknown to torch: give a name such as 'cpu' or 'cuda:0'"
        ) from error
