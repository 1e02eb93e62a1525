"""Devices: streams, events and random number generators behind one protocol."""

from swpipe.device.accelerator import AcceleratorDevice, plain
from swpipe.device.batch_copy import BatchCopy, copy_task, gives_pinned
from swpipe.device.choose import resolve
from swpipe.device.cpu import CpuDevice, on_cpu
from swpipe.device.protocol import Device, Event, GeneratorStates, Stream

__all__ = [
    "AcceleratorDevice",
    "BatchCopy",
    "CpuDevice",
    "Device",
    "Event",
    "GeneratorStates",
    "Stream",
    "copy_task",
    "gives_pinned",
    "on_cpu",
    "plain",
    "resolve",
]
