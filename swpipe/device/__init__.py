"""Devices: streams and events behind one protocol."""

from swpipe.device.device import (
    AcceleratorDevice,
    CpuDevice,
    Device,
    Event,
    Stream,
    plain,
    resolve,
)

__all__ = ["AcceleratorDevice", "CpuDevice", "Device", "Event", "Stream", "plain", "resolve"]
