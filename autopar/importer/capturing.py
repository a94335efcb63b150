"""The capture, stage by stage: fake weights, export, joint trace in the dialect, lowering, equal layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import autopar.dialect  # noqa: F401  registers the operators that the trace calls
from autopar import torch_compat
from autopar.attributes import in_place_of_originals
from autopar.errors import CaptureError, UsageError
from autopar.garbage import young_garbage_only
from autopar.graph import Graph
from autopar.importer.arguments.containers import Kind
from autopar.importer.blocks.in_blocks import Plain, find_blocks
from autopar.importer.diagnosis.errors import diagnosed
from autopar.importer.experts.moe_dispatch import dispatch_rows
from autopar.importer.export.exported import Exported, Value, Whole, Within, all_held, check_plain, export
from autopar.importer.export.precision import autocast_of, check_compute_dtype, is_autocast, share_casts, where_used
from autopar.importer.layers.equal_layers import find_groups
from autopar.importer.layers.repeats import Chain, find_chains
from autopar.importer.layers.unrolling import unrolled
from autopar.importer.passes.buffer_in_place import stored
from autopar.importer.passes.dense_gradients import with_dense_gradients
from autopar.importer.stand_ins.autograd_calls import check_hooks, warn_of_checkpoint
from autopar.importer.stand_ins.fake_weights import FakeWeights, fake_weights
from autopar.importer.stand_ins.sets import in_order
from autopar.importer.trace.joint import DialectProgram, check_sizes, trace
from autopar.importer.trace.known_graphs import KNOWN, describe
from autopar.importer.trace.lowering import Lowering
from autopar.importer.trace.roles import attached
from autopar.rules import reads_values, takes_one_dtype


@dataclass(frozen=True)
class Capture:
    """A graph, the values of its inputs of kind ``constant`` by name, the attributes in which the model's forward leaves tensors, the
    classes of its result, and by path the buffers whose values are constants of the graph."""

    graph: Graph
    constants: Mapping[str, Tensor]
    left: tuple[str, ...] = ()
    result: Kind | None = None
    read: Mapping[str, Tensor] = field(default_factory=dict)


def capture_graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: Literal["train", "inference"] = "train",
    loss: Callable[..., Any] | None = None,
    loss_args: tuple[Any, ...] = (),
    compute_dtype: str | None = None,
    plain: Plain | None = None,
) -> Graph:
    """The model's graph without torch types; see ``capture``."""
    return capture(model, args, kwargs, mode=mode, loss=loss, loss_args=loss_args, compute_dtype=compute_dtype, plain=plain).graph


@torch.inference_mode(False)  # within it, of a user's, nothing is recorded
@young_garbage_only()
def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: Literal["train", "inference"] = "train",
    loss: Callable[..., Any] | None = None,
    loss_args: tuple[Any, ...] = (),
    compute_dtype: str | None = None,
    plain: Plain | None = None,
) -> Capture:
    """Capture a model on example inputs.

    Args:
        model: parameters real, fake, meta or distributed; only their shapes and dtypes are read. It is unchanged afterwards.
            In inference it is captured in evaluation mode, in training as its modules are set.
        args, kwargs: example inputs with global shapes, real, fake or meta; values are not read.
        mode: ``train`` captures forward and backward, ``inference`` the forward.
        loss: ``loss(outputs, *loss_args) -> scalar``; None when forward returns the loss, or when there is none.
        compute_dtype: what the model is computed in, beside parameters of their own dtype (see ``importer.export.precision``).
        plain: by parameter, the dims that are not to be held in blocks (see ``importer.blocks.in_blocks``).

    Raises:
        UsageError: wrong arguments. CaptureError: a model that cannot be captured, with the user's line.
    """
    torch_compat.check_tested()
    check_compute_dtype(compute_dtype)
    args, kwargs, loss_args = _check(model, args, kwargs, mode, loss, loss_args)
    check_hooks(model)
    train = mode == "train"
    held_elsewhere = in_place_of_originals(model.modules())
    with held_elsewhere, fake_weights(model, torch_compat.fake_mode(), train=train) as weights, in_order(model, loss), _plain_operators():
        passed: list[Chain] = []
        call = args, kwargs, loss, loss_args, compute_dtype
        plain = {} if plain is None else plain

        @contextmanager
        def passed_over(run: Callable[[], object]) -> Iterator[Whole]:
            passed.extend(chain for chain in _chains(model, weights, run) if chain.alike(plain))
            with ExitStack() as stack:
                wholes = [stack.enter_context(chain.passed_over()) for chain in passed]
                yield lambda: _all_of(wholes)

        whole: Graph | None = None
        try:
            exported, graph, found = _traced(model, call, weights, passed_over, plain, train=train)
            graph = where_used(graph)
            if not (passed and exported.read):  # what one layer reads, another one may have in another size
                whole = unrolled(graph, passed)
        except Exception:
            if not passed:  # else the full trace fails in the same way, or has what this one lacks
                raise
        if whole is None:
            exported, graph, found = _traced(model, call, weights, all_held, plain, train=train)
            whole = where_used(graph)
        graph = with_dense_gradients(stored(whole))
        _check_dtypes(graph)
        if train:
            _check_gradients(exported, graph)
        values = {value.name: value.value for value in found if value.kind == "constant"} | weights.constants
        constants = {item.name: values[item.name] for item in graph.of_kind("constant")}
    return Capture(dataclasses.replace(graph, groups=find_groups(graph)), constants, exported.left, exported.result, exported.read)


def _traced(
    model: nn.Module, call: tuple[Any, ...], weights: FakeWeights, within: Within, plain: Plain, *, train: bool
) -> tuple[Exported, Graph, tuple[Value, ...]]:  # fmt: skip
    """The graph, and the values that are its inputs."""
    args, kwargs, loss, loss_args, compute_dtype = call
    with diagnosed("running the model" if loss is None else "running the model and its loss"), autocast_of(compute_dtype):
        run = partial(export, model, args, kwargs, loss, loss_args, weights, train=train, compute_dtype=compute_dtype, within=within)
        exported = run()
        recording = train or bool(exported.calls)  # a forward may take gradients, of forces say, where nothing trains
        if recording and not train:
            exported = run(recording=True)
    if train and loss is not None and exported.loss is None:
        raise UsageError("the loss does not return a scalar of a floating dtype", "reduce it, with mean() for example")
    dispatch_rows(exported.graph_module)
    check_sizes(exported.graph_module)
    blocks = find_blocks(exported, plain)
    key = describe(exported, blocks, train, recording, compute_dtype)
    known = KNOWN.find(key)
    if known is not None:
        return exported, known, exported.tensors
    program = DialectProgram(exported, blocks)
    with diagnosed("tracing the model", program.place):
        traced = trace(program, recording=recording)
    lowering = Lowering(exported, traced.graph, program.origins, blocks.parameters, train=train)
    graph = share_casts(lowering.run()) if is_autocast(compute_dtype) else lowering.run()
    if not traced.graph.find_nodes(op="get_attr"):  # else it holds tensors that the exported program does not
        KNOWN.keep(key, graph)
    return exported, graph, tuple(lowering.roles.inputs.values())


def _chains(model: nn.Module, weights: FakeWeights, run: Callable[[], object]) -> tuple[Chain, ...]:
    try:
        return find_chains(model, {key: paths for key, paths in weights.paths.items() if key not in weights.hooks}, run)
    except Exception:  # the export fails in the same way, and says why
        return ()


@contextmanager
def _all_of(contexts: Sequence[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


@contextmanager
def _plain_operators() -> Iterator[None]:
    """Keep torch from choosing the CPU's own fused kernels, which a plan for another device could not run, from seeing no GPU here, and
    from writing code of graphs that nobody calls."""
    stance = torch.compiler.set_stance("force_eager")  # a module that was given to torch.compile is captured as the module it is
    fused = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        with (
            stance, without_fast_path(), torch_compat.autocast_on_cpu(), torch_compat.without_checkpoints(warn_of_checkpoint),
            torch_compat.bare_graphs(),
        ):  # fmt: skip
            yield
    finally:
        torch.backends.mkldnn.enabled = fused


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Within it, torch's attention and encoders compute in evaluation what they do in training: their fast path drops what is padding and
    gives zeros in its place."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _check(
    model: Any, args: Any, kwargs: Mapping[str, Any] | None, mode: str, loss: Any, loss_args: Any
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    if not isinstance(model, nn.Module):
        raise UsageError(f"capture needs an nn.Module, got {type(model).__name__}", "wrap functions; an ExportedProgram has module()")
    lazy = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if nn.parameter.is_lazy(value)]
    if lazy:
        have = "has" if len(lazy) == 1 else "have"
        hint = "run the lazy module once on an example input, then plan"
        raise UsageError(f"{', '.join(lazy[:3])} of the model {have} no shape yet", hint)
    scripted = next((path for path, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        what = f"{scripted}, a part of the model," if scripted else "the model"
        raise UsageError(f"{what} is a TorchScript module, which has no Python to run", "give the nn.Module that it was made from")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        check_plain(name, value)
    if mode not in ("train", "inference"):
        raise UsageError(f"unknown mode {mode!r}", "use mode='train' or mode='inference'")
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"the example inputs are a {type(args).__name__}, not a tuple", "pass a tuple, (tokens,) for one input")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(f"kwargs is a {type(kwargs).__name__}, not a mapping", "pass keyword inputs as a dictionary")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss is a {type(loss).__name__}, not a function", "pass loss(outputs, *loss_args) -> scalar")
    if not isinstance(loss_args, (tuple, list)):
        raise UsageError(f"loss_args is a {type(loss_args).__name__}, not a tuple", "pass a tuple, (targets,) for one")
    if loss_args and loss is None:
        raise UsageError("there are loss_args and no loss", "pass loss(outputs, *loss_args) -> scalar, or give the model what it takes")
    return tuple(args), dict(kwargs or {}), tuple(loss_args)


def _check_dtypes(graph: Graph) -> None:
    """What eager torch would refuse is refused here. Raises CaptureError at the user's line."""
    for op in graph.ops:
        if takes_one_dtype(op):
            dtypes = list(dict.fromkeys(graph.tensors[tensor].dtype for tensor in op.inputs))
            if len(dtypes) > 1:
                shown = " and ".join(f"{graph.tensors[tensor].dtype}{list(graph.tensors[tensor].shape)}" for tensor in op.inputs)
                place = op.location or op.module or op.name
                raise CaptureError(
                    f"{op.target} of {shown} at {place}: torch multiplies tensors of one dtype",
                    "cast the inputs or the model, model.to(dtype) for example, and what forward casts itself to its weights' dtype",
                )


def _check_gradients(exported: Exported, graph: Graph) -> None:
    """Every parameter that requires grad and that the outputs depend on must have a gradient, unless all ways to it are detached."""
    used = {output.tensor for output in graph.outputs if output.kind == "output"}
    for op in reversed([op for op in graph.ops if op.phase == "forward" and reads_values(op)]):
        used |= set(op.inputs) if used.intersection(op.outputs) else set()
    toggled = any(call.requires_grad is False for call in exported.calls)
    lost = [i.name for i in graph.inputs if i.trained and i.tensor in used and i.tensor not in graph.gradients and not toggled]
    lost = lost if not graph.gradients else [name for name in lost if name in attached(exported)]
    if lost:
        raise CaptureError(
            f"no gradient reaches {len(lost)} parameters that the forward uses: {', '.join(lost[:5])}",
            "return a differentiable loss, or set requires_grad to False on parameters that are not trained",
        )
