"""Finds each sharded module's input: the path of an attribute of the batch.

- **trace**: torch.fx traces the forward. The trace shows the arguments of each sharded module, and
  whether the model computes them.
- **direct**: matches the batch's attributes by type with the first parameter of ``input_dist``. It
  works with any forward, but the user guarantees that the forward passes that attribute unchanged,
  once.

The user may also name an input: module name to the attribute's path within the batch.

In a trace, sharded modules, and modules that contain none, are leaves. An input is found if it is
picked out of the batch, by attributes and items, or out of the result of a module that may run
ahead of the forward::

    forward(batch)                          trace               found
      x = self.sample(batch)                call_module         computed: sample(batch)
      self.tables(x.ids)                    getattr, call       tables: sample(...).ids

A module may run ahead if it holds no parameters (training changes these between two batches), is
called once, and its own arguments are found. TorchRec requires the first and the last.
"""

from __future__ import annotations

import copy
import inspect
import operator
import traceback
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.fx import Node
from torch.fx.node import map_arg

from swpipe.tasks.torchrec._torchrec import (
    ArgInfo,
    ArgInfoStepFactory,
    CallArgs,
    GetAttrArgInfoStep,
    GetItemArgInfoStep,
    KeyedJaggedTensor,
    NodeArgsHelper,
    ScalarArgInfoStep,
    ShardedModule,
    Tracer,
    TrainPipelineContext,
    get_leaf_module_names,
    get_unwrapped_module,
)
from swpipe.tasks.torchrec.step.grad_reduction import ddp_modules, is_megatrons


class RewriteError(ValueError):
    """The model cannot be pipelined; the message names the module and the fix."""


BATCH = ""
"""The key of the batch in the dict from which inputs are picked, with the batch on the device.

The dict also has the results of the modules that ran ahead of the forward, by module name.
"""


@dataclass(frozen=True, slots=True)
class Found:
    """The way from a batch to one module's input, or the reason why the input is unknown."""

    args: Any = None
    why: str = ""

    def __str__(self) -> str:
        return self.why or ", ".join(
            [_path(arg) for arg in self.args.args]
            + [f"{name}={_path(arg)}" for name, arg in self.args.kwargs.items()]
        )


def direct_inputs(batch: Any, sharded: Mapping[str, nn.Module]) -> dict[str, Found]:
    """Return the batch's attribute whose type matches the first parameter of ``input_dist``.

    If several attributes match, ``labels`` is ignored.
    """
    attributes = dict(getattr(batch, "__dict__", {}))
    return {name: _match(module, attributes, batch) for name, module in sharded.items()}


def _match(module: Any, attributes: Mapping[str, Any], batch: Any) -> Found:
    wanted = _input_types(module)
    # Without an annotated type, any attribute might be the input.
    if not wanted:
        return Found(
            why=f"the first parameter of {type(module).__name__}.input_dist says no type to match "
            "the batch's attributes with: annotate it, or name its input"
        )
    fitting = [name for name, value in attributes.items() if isinstance(value, wanted)]
    # Labels may be jagged too, and are not looked up.
    if len(fitting) > 1:
        fitting = [name for name in fitting if name != "labels"]
    if len(fitting) == 1:
        return named_input(fitting[0])
    kinds = " or ".join(kind.__name__ for kind in wanted)
    have = f"{len(fitting)} ({', '.join(fitting)})" if fitting else "none"
    return Found(
        why=f"of the attributes of {type(batch).__name__}, {have} is a {kinds}, which "
        'its input_dist takes: name the right one, inputs={"module": "attribute"}'
    )


def _input_types(module: Any) -> tuple[type, ...]:
    """Return the annotated types of the parameter that follows the module's context."""
    names = list(inspect.signature(module.input_dist).parameters)
    hint = typing.get_type_hints(type(module).input_dist).get(names[1]) if names[1:] else None
    # A union has its members as arguments; a plain class stands for itself.
    return tuple(kind for kind in typing.get_args(hint) or (hint,) if isinstance(kind, type))


def named_input(path: str) -> Found:
    """Return the input at a path within the batch, such as "features" or "user.ids"."""
    steps = [ArgInfoStepFactory.get_attr(part) for part in path.split(".")]
    return Found(CallArgs([ArgInfo([GetItemArgInfoStep(BATCH), *steps])], {}))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedModelParallel, DDP, FSDP, and Megatron's wrappers."""
    inner: nn.Module = get_unwrapped_module(model)
    # TorchRec's unwrapping does not know Megatron's wrappers. They may be nested with the others in
    # any order. Float16Module is recognised by name, since Megatron is not imported.
    while is_megatrons(inner) or type(inner).__name__ == "Float16Module":
        inner = get_unwrapped_module(inner.module)
    return inner


def reduced_by_outer_ddp(model: nn.Module, module: nn.Module) -> bool:
    """Return whether a DDP wrapper around ``module`` reduces some of its parameters.

    For example, the parameters of feature processors take part in the look-up, and DDP expects
    their gradients in the backward of the dense part.
    """
    own = {id(p) for p in module.parameters() if p.requires_grad}
    inner = set(module.modules())
    return any(
        id(parameter) in own and name not in wrapper.parameters_to_ignore
        for wrapper in ddp_modules(model)
        if wrapper not in inner
        for name, parameter in wrapper.module.named_parameters()
    )


def sharded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the sharded modules by name, without those inside another sharded module."""
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # named_modules yields a module before the modules within it.
        within = any(name.startswith(f"{outer}.") or outer == "" for outer in outermost)
        if isinstance(module, ShardedModule) and not within:
            outermost[name] = module
    return outermost


def _path(arg: Any) -> str:
    text = "batch"
    for step in arg.steps:
        if step is arg.steps[0] and getattr(step, "item_index", BATCH) != BATCH:
            text = f"{step.item_index}(...)"
        elif isinstance(step, ScalarArgInfoStep):
            text = repr(step.value)
        elif isinstance(step, GetAttrArgInfoStep):
            text += f".{step.attr_name}"
        elif isinstance(step, GetItemArgInfoStep) and step is not arg.steps[0]:
            text += f"[{step.item_index!r}]"
    return text


class Traced(NamedTuple):
    """The input of each sharded module, and the arguments of modules that run ahead."""

    inputs: dict[str, Found]
    # In the order of the forward, since modules may draw random numbers.
    computed: dict[str, Any]


def traced_inputs(
    model: nn.Module, batch: Any, sharded: Mapping[str, nn.Module], *, postproc: bool = False
) -> Traced:
    """Return the arguments of each sharded module, found by tracing; ``model`` has no wrappers.

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
        raise ValueError(_untraced(model, error)) from error
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    # A placeholder with ph_key is a part of the batch: to_proxy has flattened it.
    flattened = any(hasattr(node, "ph_key") for node in graph.nodes)
    finder = _Finder(model, calls, postproc=postproc, flattened=flattened)
    inputs = {name: finder.input_of(name) for name in sharded}
    computed = {name: finder.computed[name] for name in calls if name in finder.computed}
    return Traced(inputs, computed)


def _untraced(model: nn.Module, error: Exception) -> str:
    """Return why the forward cannot be traced, at which line, and what to do."""
    compiled = [
        repr(name) if name else "the model"
        for name, module in model.named_modules()
        if isinstance(module, OptimizedModule) and sharded_modules(module)
    ]
    if compiled:
        return (
            f"{' and '.join(compiled)} was made by torch.compile(), which torch.fx cannot trace, "
            "and holds sharded modules: call .compile() of the module instead, which compiles it "
            "in place, or compile modules that hold none"
        )
    # The last frame outside of swpipe, torch and TorchRec is the user's line that failed.
    frames = traceback.extract_tb(error.__traceback__)
    homes = (__file__, torch.__file__, inspect.getfile(KeyedJaggedTensor))
    libraries = tuple(
        f"{Path(file).parents[up]}/" for file, up in zip(homes, (3, 0, 1), strict=True)
    )
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    at = f" at {own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`" if own else ""
    return (
        f"torch.fx cannot trace the forward of {type(model).__name__}{at} ({error}). Keep control "
        "flow that depends on data out of the modules that hold sharded ones (what holds none "
        'is not traced), or give find="direct" if each sharded module is called once, with an '
        "attribute of the batch as it is"
    )


class _Tracer(Tracer):  # type: ignore[misc]
    """A tracer for which modules within a leaf are leaves too if they are called directly."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        within = any(module_qualified_name.startswith(f"{leaf}.") for leaf in self._leaf_modules)
        return within or super().is_leaf_module(m, module_qualified_name)


class _Finder(NodeArgsHelper):  # type: ignore[misc]
    """Follows arguments back to the batch, through modules that may run ahead.

    ``flattened`` says that the forward takes the parts of the batch separately (``to_proxy``).
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Mapping[str, list[Node]],
        *,
        postproc: bool,
        flattened: bool,
    ) -> None:
        # With a context that is used for nothing else, since TorchRec's helper requires one.
        super().__init__(model, TrainPipelineContext(), postproc)
        self.computed: dict[str, Any] = {}
        self._flattened = flattened
        self._calls = calls
        self._why = ""
        self._lost = 0

    def input_of(self, name: str) -> Found:
        """Return the input of a sharded module.

        If the input is unknown, modules that only this module needs are not computed ahead.
        """
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
        # Following the arguments adds modules to `computed`, which are dropped if the input is not
        # found in the end.
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
        args, count = self.get_node_args(node, **options)
        return args if given and count == given else None

    # ------------------------------------------------------- called by TorchRec's NodeArgsHelper

    def _get_node_args_helper_inner(self, arg: Any, for_postproc_module: bool = False) -> Any:
        # TorchRec's helper follows attributes and items to their root. Two cases that it would get
        # wrong are refused before: see the comments at each return.
        root = arg
        while isinstance(root, Node) and root.target in (getattr, operator.getitem):
            if any(_nodes(root.args[1:])):
                # The key of an item is computed, so its value is unknown before the forward.
                return None
            root = root.args[0]
        if getattr(root, "target", None) is KeyedJaggedTensor and not self._flattened:
            # TorchRec would take the values of the jagged tensor for the tensor itself.
            return None
        return super()._get_node_args_helper_inner(arg, for_postproc_module)

    # Inputs are picked from a dict that also has the results of modules, so that a placeholder is
    # first the item BATCH of this dict.
    def _handle_placeholder(self, child_node: Node, arg_info: ArgInfo) -> ArgInfo:
        return super()._handle_placeholder(child_node, arg_info).add_step(GetItemArgInfoStep(BATCH))

    def _handle_module(self, child_node: Node, arg_info: ArgInfo) -> ArgInfo | None:
        name = str(child_node.target)
        # A module that several inputs need is computed once.
        if name not in self.computed:
            if why := self._refusal(name):
                self._why = self._why or f" by {name!r}, {why}"
                return None
            args = self._args_of(child_node, for_postproc_module=True)
            if args is None:
                self._why = self._why or f" by {name!r}, whose own arguments are not found"
                return None
            self.computed[name] = args
        return arg_info.add_step(GetItemArgInfoStep(name))

    def _handle_constant(
        self, arg: Any, arg_info: ArgInfo, for_postproc_module: bool = False
    ) -> ArgInfo | None:
        if isinstance(arg, tuple | slice) and any(_nodes(arg)):
            # TorchRec would pass the nodes themselves to the module.
            return None
        # An element that cannot be found is handed on as None by TorchRec (1.8). _lost counts
        # these, so the whole container counts as not found.
        lost = self._lost
        steps = super()._handle_constant(arg, arg_info, for_postproc_module)
        return steps if self._lost == lost else None

    def _handle_collection_element(self, arg: Any, for_postproc_module: bool = False) -> Any:
        if not isinstance(arg, Node | list | dict | tuple | slice):
            return arg
        steps = self._get_node_args_helper_inner(arg, for_postproc_module)
        self._lost += steps is None
        return steps

    # ---------------------------------------------------------------------------------------------

    def _refusal(self, name: str) -> str:
        """Return why a module may not run ahead of the forward, or ""."""
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
        # Shared modules would see the calls in another order than in the forward.
        for other in self.computed:
            called = self._model.get_submodule(other)
            if module in {*called.modules()} or called in {*module.modules()}:
                return f"which shares modules with {other!r}, that is called too"
        return ""


def _nodes(value: Any) -> Iterator[Node]:
    """Return the nodes within an argument, at any depth."""
    nodes: list[Node] = []
    map_arg(value, nodes.append)
    return iter(nodes)
