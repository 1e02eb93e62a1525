"""Tensors, modules and storages within nested values, for the authors of systems.

A batch or a context's attribute may be any nesting of containers. ``tensors_in``, ``map_tensors``
and ``record_stream`` open lists, tuples, dicts, sets, dataclasses, nodes registered with torch's
pytree, and objects with a ``record_stream`` method such as TorchRec's ``KeyedJaggedTensor``. They
handle cycles, and keep shared objects shared.

Stability: provisional. Names may change in a minor release, with an entry in the changelog.
"""

from swpipe._values.stateful import modules_in
from swpipe._values.storages import Storages, nbytes
from swpipe._values.walk import map_tensors, parts_of, record_stream, tensors_in

__all__ = [
    "Storages",
    "map_tensors",
    "modules_in",
    "nbytes",
    "parts_of",
    "record_stream",
    "tensors_in",
]
