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

import inspect
import operator
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch._dynamo import OptimizedModule
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from swpipe.tasks.torchrec._torchrec import (
    ShardedModule,
    Tracer,
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
class TracedArguments:
    """The arguments of one module's call, as traced, or the reason why its input is unknown.

    In ``args`` and ``kwargs``, nodes of torch.fx stand for the values of one batch. ``late`` says
    whether the forward computes something before the call.
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    late: bool = False

    def values(self, source: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments for one batch, picked from the batch and the results of modules.

        Lists and dicts within an argument are torch.fx's immutable ones.
        """
        args, kwargs = map_arg((self.args, self.kwargs), partial(_value, source))
        return [*args], {**kwargs}

    def __str__(self) -> str:
        named = [f"{name}={_text(arg)}" for name, arg in self.kwargs.items()]
        return self.why or ", ".join([*map(_text, self.args), *named])


PICKS = {
    ("call_function", getattr),
    ("call_function", operator.getitem),
    ("call_method", "get"),
}
"""What a forward may do with a batch on the way to an input: an attribute, an item, ``get``."""


def _value(source: Mapping[str, Any], node: Node) -> Any:
    """Return the value of a node for one batch."""
    if node.op == "placeholder":
        return source[BATCH]
    if node.op == "call_module":
        return source[str(node.target)]
    args: Any = map_arg(node.args, partial(_value, source))
    owner, *keys = args
    pick: Any = node.target
    return owner.get(*keys, **node.kwargs) if pick == "get" else pick(owner, *keys)


def _text(arg: Any) -> str:
    """Return how a message shows a traced argument, such as ``batch.ids``."""
    if not isinstance(arg, Node):
        return repr(arg)
    if arg.op in ("placeholder", "call_module"):
        return "batch" if arg.op == "placeholder" else f"{arg.target}(...)"
    owner, key = map(_text, arg.args[:2])
    return f"{owner}.{arg.args[1]}" if arg.target is getattr else f"{owner}[{key}]"


def direct_inputs(batch: Any, sharded: Mapping[str, nn.Module]) -> dict[str, TracedArguments]:
    """Return the batch's attribute whose type matches the first parameter of ``input_dist``.

    If several attributes match, ``labels`` is ignored.
    """
    attributes = dict(getattr(batch, "__dict__", {}))
    return {name: _match(module, attributes, batch) for name, module in sharded.items()}


def _match(module: Any, attributes: Mapping[str, Any], batch: Any) -> TracedArguments:
    wanted = _input_types(module)
    # Without an annotated type, any attribute might be the input.
    if not wanted:
        return TracedArguments(
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
    return TracedArguments(
        why=f"of the attributes of {type(batch).__name__}, {have} is a {kinds}, which "
        'its input_dist takes: name the right one, inputs={"module": "attribute"}'
    )


def _input_types(module: Any) -> tuple[type, ...]:
    """Return the annotated types of the parameter that follows the module's context."""
    names = list(inspect.signature(module.input_dist).parameters)
    hint = typing.get_type_hints(type(module).input_dist).get(names[1]) if names[1:] else None
    # A union has its members as arguments; a plain class stands for itself.
    return tuple(kind for kind in typing.get_args(hint) or (hint,) if isinstance(kind, type))


def named_input(path: str) -> TracedArguments:
    """Return the input at a path within the batch, such as "features" or "user.ids"."""
    graph = Graph()
    node = graph.placeholder("batch")
    for name in path.split("."):
        node = graph.call_function(getattr, (node, name))
    return TracedArguments([node])


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


class Traced(NamedTuple):
    """The input of each sharded module, and the arguments of modules that run ahead."""

    inputs: dict[str, TracedArguments]
    # In the order of the forward, since modules may draw random numbers.
    computed: dict[str, TracedArguments]


def traced_inputs(
    model: nn.Module, sharded: Mapping[str, nn.Module], *, postproc: bool = False
) -> Traced:
    """Return the arguments of each sharded module, found by tracing; ``model`` has no wrappers.

    With ``postproc``, modules may run ahead of the forward.

    Raises:
        RewriteError: The forward cannot be traced.
    """
    try:
        graph = _Tracer(get_leaf_module_names(model)).trace(model)
    except Exception as error:
        raise RewriteError(_untraced(model, error)) from error
    finder = _Finder(model, graph.nodes, postproc=postproc)
    inputs = {name: finder.input_of(name) for name in sharded}
    return Traced(inputs, finder.computed_for(inputs))


def _untraced(model: nn.Module, error: Exception) -> str:
    """Return why the forward cannot be traced, and what to do."""
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
    return (
        f"torch.fx cannot trace the forward of {type(model).__name__} ({error}). Keep control "
        "flow that depends on data out of the modules that hold sharded ones (what holds none "
        'is not traced), or give find="direct" if each sharded module is called once, with an '
        "attribute of the batch as it is"
    )


class _Tracer(Tracer):  # type: ignore[misc]
    """A tracer for which modules within a leaf are leaves too if they are called directly."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        within = any(module_qualified_name.startswith(f"{leaf}.") for leaf in self._leaf_modules)
        return within or super().is_leaf_module(m, module_qualified_name)


class _Finder:
    """Says which arguments of modules' calls can be computed ahead of the forward."""

    def __init__(self, model: nn.Module, nodes: Iterable[Node], *, postproc: bool) -> None:
        self._model = model
        self._nodes = list(nodes)
        self._postproc = postproc
        self._calls: dict[str, list[Node]] = {}
        for node in self._nodes:
            if node.op == "call_module":
                self._calls.setdefault(str(node.target), []).append(node)

    def input_of(self, name: str) -> TracedArguments:
        """Return the input of a sharded module."""
        calls = self._calls.get(name, [])
        if not calls:
            return TracedArguments(why="the forward never calls it: take it out of the model")
        if len(calls) > 1:
            return TracedArguments(
                why=f"it is called {len(calls)} times in one forward, but its input is exchanged "
                "once per batch: call it once and share the result, or use one module per call"
            )
        (call,) = calls
        obstacle = next(self._obstacles(call), None)
        if obstacle is None:
            return TracedArguments(call.args, call.kwargs)
        given = ", ".join(map(str, [*call.args, *call.kwargs.values()]))
        return TracedArguments(
            why=f"its input ({given}) is computed in the forward{obstacle}, not picked out of the "
            "batch: compute it before the pipeline, as part of the batch, or in a module without "
            "parameters, called with parts of the batch, with pipeline_postproc=True"
        )

    def computed_for(self, inputs: Mapping[str, TracedArguments]) -> dict[str, TracedArguments]:
        """Return the arguments of the modules from whose results these inputs are picked."""
        ahead: set[str] = set()
        calls = [call for name in inputs if not inputs[name].why for call in self._calls[name]]
        while calls:
            nodes = calls.pop().all_input_nodes
            ahead.update(str(node.target) for node in nodes if node.op == "call_module")
            calls += nodes
        computed: dict[str, TracedArguments] = {}
        late = False
        for node in self._nodes:
            if node.op == "call_module" and node.target in ahead:
                name = str(node.target)
                computed[name] = TracedArguments(node.args, node.kwargs, late=late)
            # A node without inputs, such as a constant, reads nothing of the batch.
            elif node.all_input_nodes and (node.op, node.target) not in PICKS:
                late = True
        return computed

    def _obstacles(self, call: Node) -> Iterator[str]:
        """Yield what keeps a call's arguments from being computed ahead of the forward.

        An obstacle is a module, with the reason, or "" for other code.
        """
        for node in call.all_input_nodes:
            if node.op == "call_module":
                name = str(node.target)
                yield from (f" by {name!r}, {why}" for why in self._refusals(name))
                for obstacle in self._obstacles(node):
                    yield obstacle or f" by {name!r}, whose own arguments are not found"
            elif node.op != "placeholder":
                if (node.op, node.target) not in PICKS:
                    yield ""
                yield from self._obstacles(node)

    def _refusals(self, name: str) -> Iterator[str]:
        """Yield why a module may not run ahead of the forward."""
        if not self._postproc:
            yield "a module that would run ahead with pipeline_postproc=True"
        module = self._model.get_submodule(name)
        if isinstance(module, ShardedModule):
            yield "whose embeddings come after the exchange"
        if parameters := [of for of, _ in module.named_parameters()]:
            yield f"which holds parameters ({', '.join(parameters)}) that each step changes"
        if (times := len(self._calls[name])) > 1:
            yield f"which is called {times} times in one forward: share one result"
        # Shared modules would see the calls in another order than in the forward.
        for other in self._calls.keys() - {name}:
            called = self._model.get_submodule(other)
            if module in {*called.modules()} or called in {*module.modules()}:
                yield f"which shares modules with {other!r}, that is called too"
