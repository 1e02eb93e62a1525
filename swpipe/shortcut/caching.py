"""The first run of a shortcut task: what it produces is cached."""

from __future__ import annotations

from typing import Any

import torch

from swpipe._tensors.pytree import tensors_in
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.shortcut.cache import Cache, Produced, Values, call_io
from swpipe.shortcut.changes import ContextWatch
from swpipe.shortcut.gradients import LeafGradients
from swpipe.shortcut.graft import find_sources, gradient_edges


def run_and_cache(task: PipelineTask, ctx: Any, device: Device) -> Cache:
    """Run a task; what it changed in the context, and what each io captures afterwards.

    Raises:
        ShortcutError: An output cannot be cached.
    """
    with ContextWatch(ctx) as watch:
        edges = gradient_edges(watch.before) if torch.is_grad_enabled() else {}
        gradients = LeafGradients(watch.before)
        task.fn(ctx)
    produced, deleted = watch.changes
    states = [call_io(task, index, "capture", io.capture) for index, io in enumerate(task.io)]
    values = Values({name: vars(ctx)[name] for name in produced}, states)
    made = list(tensors_in(values))
    sources = find_sources((tensor for tensor in made if not tensor.is_leaf), edges, made)
    changes = Produced(values, deleted, gradients.changed(), sources)
    return Cache(task.name, ctx, changes, device)
