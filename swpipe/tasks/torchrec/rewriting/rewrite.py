"""Replaces the forwards of sharded modules, so that tasks can exchange their ids earlier.

    prepare(batch)   first batch: find the modules' inputs and make the replacements
    compute(batch)   each batch: run the modules that compute inputs, if there are any
    start(batch)     each batch: start the exchange
    use(...)         each batch: before the model runs; done() after it
    attach()         install the replacements        ┐ any number of times,
    detach()         restore the original forwards   ┘ also during training

If one model has several rewrites, one of them is attached at a time: ``attach`` detaches the other
rewrites, which keep their batches.

The exchanges of sizes of all modules are fused into one, by replacing the forward of each
``KJTAllToAll``. A sharded module creates these in its first ``input_dist``, so the first batch is
not fused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from swpipe.device import Device
from swpipe.tasks.torchrec._torchrec import fuse_input_dist_splits, override_input_dist_forwards
from swpipe.tasks.torchrec.embedding_tables.released import MARK, Releases
from swpipe.tasks.torchrec.rewriting.awaitables import fused_splits
from swpipe.tasks.torchrec.rewriting.exchanged import CallInputs
from swpipe.tasks.torchrec.rewriting.forwards import FORWARDS, SparseDistContext
from swpipe.tasks.torchrec.rewriting.inputs import (
    BATCH,
    RewriteError,
    Traced,
    TracedArguments,
    direct_inputs,
    named_input,
    reduced_by_outer_ddp,
    sharded_modules,
    traced_inputs,
    unwrapped,
)
from swpipe.tasks.torchrec.rewriting.postproc import (
    PostprocForward,
    PostprocResults,
    compute_ahead,
)
from swpipe.tasks.torchrec.step.task_options import Find, TaskOptions

LATE = "; looked up within the dense part, since DDP reduces parameters of it"


_REWRITES: WeakKeyDictionary[nn.Module, WeakSet[Rewrite]] = WeakKeyDictionary()
"""Sharded module to all rewrites of it."""


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """The result of the search for one sharded module's input.

    ``kind`` is the module's class. ``pipelined`` says whether earlier tasks exchange its ids.
    ``inputs`` describes its input within the batch, or says why the input is unknown.
    """

    name: str
    kind: str
    pipelined: bool
    inputs: str

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.kind}) {'' if self.pipelined else 'NOT '}pipelined: {self.inputs}"
        )


@dataclass(frozen=True, slots=True)
class RewriteReport:
    """The sharded modules that are pipelined, and the reasons why others are not.

    ``modules`` has one entry per sharded module. ``computed`` has the modules that run ahead of the
    forward, with their inputs, in order.
    """

    modules: tuple[ModuleReport, ...]
    found_by: Find
    computed: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"sharded modules, inputs found by {self.found_by}:"
        ahead = [f"  computed ahead: {call}" for call in self.computed]
        return "\n".join([head, *(f"  {module}" for module in self.modules), *ahead])


class Rewrite:
    """The replaced forwards of one model.

    ``looks_up_ahead`` says whether EmbForward looks up and DenseForward runs the model. ``sharded``
    has all sharded modules by name, and ``late`` the names of those that a split pipeline looks up
    within the dense part. ``report`` is None before the first batch. ``forwards`` has one entry per
    pipelined module, ``postprocs`` one per module that runs ahead. ``home`` is the stream on which
    the model runs. ``look_ups`` has, by name, functions that look up in place of modules'
    ``compute_and_output_dist``. ``others`` are rewrites of the same modules. ``refusal`` is set by
    the pipeline: it takes whether another rewrite would train, and returns why that rewrite may not
    run now, or "".

    Raises:
        RewriteError: The model has no sharded module, unless ``forward`` is "own".
    """

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        options: TaskOptions = TaskOptions(),  # noqa: B008 - frozen
    ) -> None:
        self.looks_up_ahead = options.forward in ("split", "ahead")
        self.report: RewriteReport | None = None
        self.attached = False
        self.forwards: tuple[Any, ...] = ()
        self.postprocs: tuple[PostprocForward, ...] = ()
        self._device = device
        # A cache that is filled on another stream needs the caller's, on which the model runs.
        self.home = device.current_stream()
        self._options = options
        # A step without memory options makes no call for them.
        self._releases = Releases(options.memory, device) if options.memory else None
        self._inner = unwrapped(model)
        self._undo = ExitStack()
        self._fused = False
        self.look_ups: dict[str, Callable[[Any, Any], Any]] = {}
        self.others: WeakSet[Rewrite] = WeakSet()
        self.refusal: Callable[[bool], str] = lambda trains: ""
        self.sharded = sharded_modules(self._inner)
        # A DDP wrapper around such a module waits for these gradients in the dense backward, so the
        # look-up has to be in the dense part's graph.
        self.late = frozenset(
            name
            for name, module in self.sharded.items()
            if self.looks_up_ahead and reduced_by_outer_ddp(model, module)
        )
        if options.forward != "own":
            self._check_names()

    def prepare(self, batch: Any) -> None:
        """Find the modules' inputs with a batch on the device, once, and attach.

        Warns:
            RuntimeWarning: A module is not pipelined.
        """
        # Raises if batches in flight in another pipeline of the model forbid this one to run.
        self._detach_others()
        traced = self._find_inputs(batch)
        inputs = traced.inputs
        self.report = self._reported(traced)
        wanted = () if self._options.forward == "own" else self.report.modules
        bad = [f"  {m.name}: {m.inputs}" for m in wanted if not m.pipelined]
        if bad and self._options.strict:
            raise RewriteError(
                "\n".join(["sharded modules that cannot be pipelined:", *bad])
                + "\n(with strict=False such a "
                "module keeps its own forward: correct, but its exchange of ids is not overlapped)"
            )
        if bad:
            head = "sharded modules that are not pipelined, so that exchanges of their ids overlap "
            warnings.warn("\n".join([f"{head}nothing:", *bad]), RuntimeWarning, stacklevel=2)
        self.forwards = tuple(
            FORWARDS["prefetch" if name in self.late else self._options.forward](
                name, inputs[name], module, self._device
            )
            for name, module in self.sharded.items()
            if not inputs[name].why
        )
        self.postprocs = tuple(
            PostprocForward(name, args, self._inner.get_submodule(name), self._device)
            for name, args in traced.computed.items()
        )
        self.attach()

    def attach(self) -> None:
        """Install the replacements."""
        if self.attached:
            return
        # Before the first batch is pulled: another pipeline's batches in flight may forbid it.
        self._detach_others()
        if self.report is None:
            return
        for forward in self.forwards:
            # TorchRec's row-wise sharded feature processors transform the input in input_dist
            # unless is_pipelined is set.
            self._set(forward._module, "forward", forward)
            self._set(forward._module, "is_pipelined", True)
            if self._releases is not None and self._releases.marks(forward._module):
                self._set(forward._module, MARK, True)
        for postproc in self.postprocs:
            self._set(postproc._module, "forward", postproc)
        # The first batch has to run without this, since it makes the modules' KJTAllToAll objects.
        if self._fused:
            self._fuse()
        self.attached = True

    def detach(self) -> None:
        """Restore the model; batches in flight are kept."""
        self._undo.close()
        self.attached = False

    def check_others(self, trains: bool) -> None:
        """Raise RuntimeError if batches in flight in another pipeline of the model forbid it."""
        for rewrite in self.others:
            if why := rewrite.refusal(trains):
                raise RuntimeError(
                    f"another pipeline of this model has batches in flight, and {why}: call "
                    "drain() of that pipeline first"
                )

    def _detach_others(self) -> None:
        # Rewrites are registered per sharded module, so that rewrites of different wrappers of a
        # module meet too. The references are weak: a rewrite that was dropped has nothing in
        # flight. They are looked up at each attach: rewrites may have come or gone in the meantime.
        for module in self.sharded.values():
            rewrites = _REWRITES.setdefault(module, WeakSet())
            rewrites.add(self)
            self.others |= rewrites
        self.others.discard(self)
        self.check_others(self._inner.training and torch.is_grad_enabled())
        for rewrite in self.others:
            rewrite.detach()

    def compute(self, batch: Any, iteration: int) -> PostprocResults | None:
        """Run the modules that compute inputs, if any; the first batch calls ``prepare``."""
        if not self.attached:
            self._attach_first(batch)
        postprocs = self.postprocs
        return compute_ahead(postprocs, batch, iteration, self._device) if postprocs else None

    def start(self, batch: Any, context: SparseDistContext) -> None:
        """Start the exchange of the sizes of one batch's ids; the first batch calls ``prepare``.

        Each module is called as in TorchRec's pipelines. If all modules keep their own forward,
        there is nothing to exchange.
        """
        if not self.attached:
            self._attach_first(batch)
        # Results of modules that ran ahead are looked up by the name of the module, the batch by
        # "".
        source = {BATCH: batch, **({} if context.computed is None else context.computed.values)}
        for forward in self.forwards:
            name = forward.name
            module = forward._module
            inputs = forward.args.values(source)
            # Noted before preprocess_input and input_dist, which may replace tensors of the input.
            context.inputs[name] = CallInputs(*inputs)
            if self._releases is not None:
                inputs = self._releases.lent(inputs)
            args, kwargs = module.preprocess_input(*inputs)
            module_context = module.create_context()
            context.module_contexts[name] = module_context
            request = module.input_dist(module_context, *args, **kwargs)
            context.input_dist_splits_requests[name] = request
        if self._releases is not None:
            self._releases.started(context)
        # TorchRec's private _fuse_input_dist_splits groups the requests by process group, and fills
        # fused_splits_awaitables. Each of them is wrapped, so that a shortcut can wait again.
        fuse_input_dist_splits(context)
        fused = context.fused_splits_awaitables
        for place, (names, splits) in enumerate(fused):
            contexts = list(map(context.module_contexts.__getitem__, names))
            fused[place] = names, fused_splits(splits, contexts, self._device)
        # The requests are one-shot, and the fused exchange waits for them.
        context.input_dist_splits_requests.clear()
        if not self._fused:
            self._fuse()
            self._fused = True

    def use(self, context: SparseDistContext, iteration: int) -> None:
        """Make the replaced forwards use this iteration's context."""
        for forward in self.forwards:
            forward.set_context(context)
            forward.iteration = iteration
            forward.compute = self.look_ups.get(forward.name)
        for postproc in self.postprocs:
            postproc.results = context.computed
            postproc.iteration = iteration

    def done(self) -> None:
        """Drop the results of modules that ran ahead of one batch's forward."""
        for postproc in self.postprocs:
            postproc.results = None

    def _attach_first(self, batch: Any) -> None:
        if self.report is not None:
            raise RuntimeError("the model is detached from its pipeline: call attach() first")
        self.prepare(batch)

    def prefetch(
        self,
        context: SparseDistContext,
        counting: Callable[[Any], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Wait for the ids; modules with a cache fill it.

        ``counting`` takes the ids and returns a block, in which each module prefetches.
        """
        if self._releases is not None:
            self._releases.sent(context)
        # TorchRec's prefetch takes the stream of the look-up, so that rows are kept for it; None if
        # both run on the same stream.
        forward_stream = None if self._device.current_stream() == self.home else self.home
        for forward in self.forwards:
            if not forward.prefetches:
                continue
            name = forward.name
            request = context.input_dist_tensors_requests.pop(name)
            data, module_context = request.wait_with_context()
            with counting(data):
                forward._module.prefetch(
                    ctx=module_context, dist_input=data, forward_stream=forward_stream
                )
            # Stored where TorchRec's prefetch pipeline stores them, since its context has these
            # fields.
            context.module_input_post_prefetch[name] = data
            context.module_contexts_post_prefetch[name] = module_context
            del context.module_contexts[name]

    # A misspelt name would otherwise be ignored, and the module's input searched.
    def _check_names(self) -> None:
        if not self.sharded:
            raise RewriteError(
                f"{type(self._inner).__name__} has no sharded module, so there is nothing to "
                "pipeline: shard its embeddings first (torchrec's DistributedModelParallel), or "
                "use prefetch_plan with tasks of your own"
            )
        for name in self._options.inputs:
            if name not in self.sharded:
                raise RewriteError(
                    f"inputs names {name!r}, which is not a sharded module of the model; those are "
                    f"{', '.join(self.sharded)}"
                )

    def _reported(self, traced: Traced) -> RewriteReport:
        inputs = traced.inputs
        modules = (
            ModuleReport(
                name,
                type(module).__name__,
                not inputs[name].why,
                f"{inputs[name]}{LATE if name in self.late else ''}",
            )
            for name, module in self.sharded.items()
        )
        computed = (f"{name}({arguments})" for name, arguments in traced.computed.items())
        return RewriteReport(tuple(modules), self._options.find, tuple(computed))

    def _find_inputs(self, batch: Any) -> Traced:
        # Inputs that the user names are not searched: the search may fail just for these modules.
        named = {name: named_input(path) for name, path in self._options.inputs.items()}
        if self._options.forward == "own":
            named = dict.fromkeys(
                self.sharded, TracedArguments(why="it keeps its own forward, as asked for")
            )
        rest = {name: m for name, m in self.sharded.items() if name not in named}
        if not rest:
            return Traced(named, {})
        if self._options.find == "direct":
            return Traced(named | direct_inputs(batch, rest), {})
        traced = traced_inputs(self._inner, rest, postproc=self._options.pipeline_postproc)
        return Traced(named | traced.inputs, traced.computed)

    def _fuse(self) -> None:
        modules = [forward._module for forward in self.forwards]
        # Called after the first batch: _dist of an input_dist is its KJTAllToAll, whose forward
        # TorchRec's private _override_input_dist_forwards replaces. It has no undo of its own.
        for child in (child for module in modules for child in module.modules()):
            for input_dist in getattr(child, "_input_dists", ()):
                if hasattr(input_dist, "_dist"):
                    self._remember(input_dist._dist, "forward")
        override_input_dist_forwards(modules)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._remember(owner, name)
        setattr(owner, name, value)

    def _remember(self, owner: Any, name: str) -> None:
        """Let ``detach`` restore the attribute's current value, or delete an inherited one."""
        if name in vars(owner):
            self._undo.callback(vars(owner).update, {name: vars(owner)[name]})
        else:
            self._undo.callback(vars(owner).pop, name, None)
