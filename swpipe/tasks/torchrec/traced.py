"""Finds the inputs of sharded modules by tracing the model's forward with torch.fx.

Sharded modules, and modules that contain none, are leaves of the trace. An input is found if it is
picked out of the batch, by attributes and items, or out of the result of a module that may run
ahead of the forward::

    forward(batch)                          trace               found
      x = self.sample(batch)                call_module         computed: sample(batch)
      self.tables(x.ids)                    getattr, call       tables: sample(...).ids

A module may run ahead if it holds no parameters (training changes these between two batches), is
called once, and its own arguments are found. TorchRec asks for the first and the last.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from swpipe.tasks.torchrec._torchrec import (
    ArgInfo,
    NodeArgsHelper,
    ShardedModule,
    Tracer,
    get_leaf_module_names,
)
from swpipe.tasks.torchrec.contexts import new_context
from swpipe.tasks.torchrec.inputs import Found, OfBatch, OfModule


@dataclass(frozen=True, slots=True)
class Traced:
    """What a trace has found.

    Attributes:
        inputs: The input of each sharded module.
        computed: The arguments of each module that runs ahead of the forward, in its order.
    """

    inputs: dict[str, Found]
    computed: dict[str, Any]


def traced_inputs(
    model: nn.Module, batch: Any, sharded: Mapping[str, nn.Module], *, postproc: bool = False
) -> Traced:
    """What each sharded module is called with; ``model`` has no wrappers.

    The batch's ``to_proxy`` or ``to_proxy_tuple`` is used, as in TorchRec. With ``postproc``,
    modules may run ahead of the forward.

    Raises:
        ValueError: The forward cannot be traced.
    """
    concrete: Any = {}
    if hasattr(batch, "to_proxy"):
        concrete = {"inputs": copy.copy(batch).to_proxy()}
    elif hasattr(batch, "to_proxy_tuple"):
        concrete = batch.to_proxy_tuple(model)
    try:
        tracer = _Tracer if postproc else Tracer
        graph = tracer(get_leaf_module_names(model)).trace(model, concrete_args=concrete)
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot trace the forward of {type(model).__name__} ({error}). Keep control "
            "flow that depends on data out of the modules that hold sharded ones (what holds none "
            'is not traced), or give find="direct" if each sharded module is called once, with an '
            "attribute of the batch as it is"
        ) from error
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    flattened = any(hasattr(node, "ph_key") for node in graph.nodes)
    finder = _Finder(model, calls, postproc=postproc, flattened=flattened)
    inputs = {name: finder.input_of(name) for name in sharded}
    # In the order of the forward: modules may draw random numbers.
    return Traced(
        inputs, {name: finder.computed[name] for name in calls if name in finder.computed}
    )


class _Tracer(Tracer):  # type: ignore[misc]
    """Modules within a leaf are leaves too, if the forward calls them directly."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        within = any(module_qualified_name.startswith(f"{leaf}.") for leaf in self._leaf_modules)
        return within or super().is_leaf_module(m, module_qualified_name)


class _Finder(NodeArgsHelper):  # type: ignore[misc]
    """Follows arguments back to the batch, through modules that may run ahead.

    ``flattened`` says that the forward takes the parts of the batch one by one (``to_proxy``).
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Mapping[str, list[Node]],
        *,
        postproc: bool,
        flattened: bool,
    ) -> None:
        super().__init__(model, new_context(0), postproc)
        self.computed: dict[str, Any] = {}
        self._flattened = flattened
        self._calls = calls
        self._why = ""
        self._lost = 0

    def input_of(self, name: str) -> Found:
        """The input of a sharded module; what only an unknown one needs is not computed ahead."""
        nodes = self._calls.get(name, [])
        if not nodes:
            return Found(why="the forward never calls it: take it out of the model")
        if len(nodes) > 1:
            return Found(
                why=f"it is called {len(nodes)} times in one forward, but its input is exchanged "
                "once per batch: call it once and share the result, or use one module per call"
            )
        (node,) = nodes
        self._why = ""
        before = dict(self.computed)
        args = self._args_of(node)
        if args is not None:
            return Found(args)
        self.computed = before
        given = ", ".join(map(str, [*node.args, *node.kwargs.values()]))
        return Found(
            why=f"its input ({given}) is computed in the forward{self._why}, not picked out of the "
            "batch: compute it before the pipeline, as part of the batch, or in a module without "
            "parameters, called with parts of the batch, with pipeline_postproc=True"
        )

    def _args_of(self, node: Node, **options: Any) -> Any:
        given = len(node.args) + len(node.kwargs)
        args, found = self.get_node_args(node, **options)
        return args if given and found == given else None

    # ------------------------------------------------------- called by TorchRec's NodeArgsHelper

    def _get_node_args_helper_inner(self, arg: Any, for_postproc_module: bool = False) -> Any:
        root = arg
        while isinstance(root, Node) and root.target in (getattr, operator.getitem):
            if any(_nodes(root.args[1:])):
                return None  # an item whose key is computed
            root = root.args[0]
        if getattr(root, "target", None) is KeyedJaggedTensor and not self._flattened:
            return None  # TorchRec would take its values for it
        return super()._get_node_args_helper_inner(arg, for_postproc_module)

    def _handle_placeholder(self, child_node: Node, arg_info: ArgInfo) -> ArgInfo:
        return super()._handle_placeholder(child_node, arg_info).add_step(OfBatch())

    def _handle_module(self, child_node: Node, arg_info: ArgInfo) -> ArgInfo | None:
        name = str(child_node.target)
        if name not in self.computed:
            if why := self._refusal(name):
                self._why = self._why or f" by {name!r}, {why}"
                return None
            args = self._args_of(child_node, for_postproc_module=True)
            if args is None:
                self._why = self._why or f" by {name!r}, whose own arguments are not found"
                return None
            self.computed[name] = args
        return arg_info.add_step(OfModule(name))

    def _handle_constant(
        self, arg: Any, arg_info: ArgInfo, for_postproc_module: bool = False
    ) -> ArgInfo | None:
        if isinstance(arg, tuple | slice) and any(_nodes(arg)):
            return None  # TorchRec would hand the nodes themselves on
        lost = self._lost
        found = super()._handle_constant(arg, arg_info, for_postproc_module)
        return found if self._lost == lost else None

    def _handle_collection_element(self, arg: Any, for_postproc_module: bool = False) -> Any:
        if not isinstance(arg, Node | list | dict | tuple | slice):
            return arg
        found = self._get_node_args_helper_inner(arg, for_postproc_module)
        self._lost += found is None  # TorchRec would hand None on
        return found

    # ---------------------------------------------------------------------------------------------

    def _refusal(self, name: str) -> str:
        """Why a module may not run ahead of the forward, or ""."""
        module = self._model.get_submodule(name)
        parameters = [of for of, _ in module.named_parameters()]
        times = len(self._calls[name])
        if not self._pipeline_postproc:
            return "a module that would run ahead with pipeline_postproc=True"
        if isinstance(module, ShardedModule):
            return "whose embeddings come after the exchange"
        if parameters:
            return f"which holds parameters ({', '.join(parameters)}) that each step changes"
        if times > 1:
            return f"which is called {times} times in one forward: share one result"
        for other in self.computed:
            if _nested(module, self._model.get_submodule(other)):
                return f"which shares modules with {other!r}, that is called too"
        return ""


def _nodes(value: Any) -> Iterator[Node]:
    """The nodes within an argument."""
    found: list[Node] = []
    map_arg(value, found.append)
    return iter(found)


def _nested(one: nn.Module, other: nn.Module) -> bool:
    """Whether one of two modules contains the other."""
    return any(one is part for part in other.modules()) or any(other is m for m in one.modules())
