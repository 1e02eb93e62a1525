"""The module ``torch.sim``, with the functions that torch requires of a device's module."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch
from torch._utils import CallbackRegistry
from torch.cuda import _gpu_trace

DEVICES = 2


def make() -> ModuleType:
    """Return the module; the device's library must have been loaded before."""
    ops = torch.ops.sim
    module = ModuleType("torch.sim", "The simulated accelerator.")
    generators = tuple(ops.default_generator(index) for index in range(DEVICES))

    def index_of(device: torch.device | str | int | None) -> int:
        if device is None or device == "sim":
            return current_device()
        index = device if isinstance(device, int) else torch.device(device).index
        return current_device() if index is None else index

    def current_device() -> int:
        return torch.accelerator.current_device_index()

    def get_rng_state(device: torch.device | str | int | None = None) -> torch.Tensor:
        state: torch.Tensor = generators[index_of(device)].get_state()
        return state

    def set_rng_state(
        new_state: torch.Tensor, device: torch.device | str | int | None = None
    ) -> None:
        generators[index_of(device)].set_state(new_state)

    def manual_seed(seed: int) -> None:
        generators[current_device()].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    # torch.cuda._gpu_trace and CallbackRegistry are private; torch reports events and streams of a
    # device to registries of these names in the device's module.
    registries = [name for name in vars(_gpu_trace) if name.endswith("Callbacks")]
    vars(module).update(
        current_device=current_device,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed_all,
        default_generators=generators,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device=lambda device: torch.accelerator.device_index(index_of(device)),
        device_count=lambda: DEVICES,
        set_device=torch.accelerator.set_device_index,
        synchronize=torch.accelerator.synchronize,
        current_stream=torch.accelerator.current_stream,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        _gpu_trace=SimpleNamespace(
            **{name: CallbackRegistry(f"sim {name}") for name in registries}
        ),
        # Private names that torch looks up before it seeds or initializes a device.
        _is_in_bad_fork=ops.is_forked,
        _lazy_init=lambda: None,
    )
    return module
