"""Rules of operators in place of those that DTensor has not, or has wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.torch_compat.placements import has_blocks, has_unequal_parts, split_factor_of, strided_shard
from autopar.torch_compat.tensors import draws, leaves_of, map_tensors
from autopar.torch_compat.whole_tensors import argument_of, as_torch_does, before, in_whole, is_view, on_all, reduce_partial, whole_of

_aten = torch.ops.aten
_OF_NUMBERS = (
    _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.pow.Tensor_Tensor, _aten.maximum.default,
    _aten.minimum.default, _aten.fmax.default, _aten.fmin.default, _aten.lerp.Scalar, _aten.lerp.Tensor, _aten.addcmul.default,
    _aten.addcdiv.default, _aten.logaddexp.default, _aten.stack.default, _aten.dot.default,
)  # fmt: skip
"""Operators by which losses and penalties are joined."""


@cache
def reduce_where_asked() -> None:
    """Numbers read from DTensors that are still to be reduced over ranks, and such DTensors changed in place, are reduced first.

    Of what is not reduced DTensor's dispatcher gives each rank its own number, without a word: ``parameter.norm().item()`` in an optimizer
    takes the ranks apart. A square in place it refuses, which torch's Adafactor makes of norms.
    """

    def reduce(args: tuple[Any, ...]) -> None:
        for tensor in leaves_of(args):
            reduce_partial(tensor)

    before(reduce, torch.ops.aten._local_scalar_dense.default, torch.ops.aten.pow_.Scalar, torch.ops.aten._foreach_mul_.List)


@cache
def reduce_beside_numbers() -> None:
    """Partial sums over ranks are reduced before a number is added to them.

    DTensor's dispatcher keeps its decision for a tensor without dims, to which each rank adds its share, and follows it for a number. Each
    rank then adds all of the number (counts of zeros, and whatever is float64).
    """

    def reduce(args: tuple[Any, ...]) -> None:
        if not all(isinstance(item, torch.Tensor) for item in args):
            for tensor in args:
                reduce_partial(tensor)

    before(reduce, torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor)  # in place, gradients are added up with no time to lose


@cache
def keep_numbers_plain() -> None:
    """A plain number beside DTensors has a plain gradient, and stays plain where a DTensor is added to it in place.

    DTensor's dispatcher takes such a number as the same on all ranks. What it makes is a DTensor, and so is the number's gradient.
    A loss of plain outputs, joined by a penalty of weights, cannot run backward from that. Of ``loss += penalty`` torch computes the sum,
    and fails when it should give it back.
    """
    from torch.distributed.tensor import DTensor

    before(_own_gradients, *_OF_NUMBERS)
    dispatcher: Any = DTensor._op_dispatcher
    finish = dispatcher._dispatch_fast_path_python_tail

    def finished(operator: Any, args: tuple[Any, ...], *others: Any) -> Any:
        in_place = others[-2]
        if not in_place or isinstance(args[0], DTensor) or not isinstance(args[0], torch.Tensor):
            return finish(operator, args, *others)
        _own_gradients(args)
        return args[0]

    dispatcher._dispatch_fast_path_python_tail = finished


def _own_gradients(args: tuple[Any, ...]) -> None:
    """Has each tensor that records get a gradient of its own kind: a DTensor, or a plain one."""
    from torch.distributed.tensor import DTensor

    tensors = [item for item in leaves_of(args) if isinstance(item, torch.Tensor)]
    if not torch.is_grad_enabled() or all(isinstance(item, DTensor) for item in tensors):
        return
    mesh = next(item.device_mesh for item in tensors if isinstance(item, DTensor))
    for tensor in tensors:
        known = any(isinstance(hook, _OwnKind) for hook in (tensor._backward_hooks or {}).values())
        if tensor.requires_grad and not known:
            tensor.register_hook(_OwnKind(mesh if isinstance(tensor, DTensor) else None))


class _OwnKind:
    """A hook that makes a gradient a DTensor of a mesh, the same on all ranks, or a plain tensor where there is none."""

    __torch_unserializable__ = True  # a tensor that is saved says nothing of it

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        if self.mesh is None or isinstance(gradient, DTensor):
            return whole_of(gradient) if self.mesh is None else gradient
        return on_all(gradient, self.mesh)


@cache
def reduce_parameters() -> None:
    """A DTensor that becomes a parameter is reduced over ranks first, to be trained and saved: ``weight_norm`` makes norms so."""
    from torch.distributed.tensor import DTensor, Replicate

    def reduced(module: nn.Module, name: str, parameter: Any) -> Any:
        if not isinstance(parameter, DTensor) or not any(placement.is_partial() for placement in parameter.placements):
            return None
        placements = [Replicate() if placement.is_partial() else placement for placement in parameter.placements]
        return nn.Parameter(parameter.detach().redistribute(placements=placements), parameter.requires_grad)

    nn.modules.module.register_module_parameter_registration_hook(reduced)


@cache
def make_orthogonal() -> None:
    """``parametrizations.orthogonal`` of a DTensor makes the whole matrix on every rank: DTensor has none of the factorisations for it."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.nn.utils import parametrizations

    def whole(method: Callable[..., Any]) -> Callable[..., Any]:
        def made(self: Any, matrix: Any) -> Any:
            if not isinstance(matrix, DTensor):
                return method(self, matrix)
            mesh, held = matrix.device_mesh, self._buffers
            replicated = [Replicate()] * mesh.ndim
            if isinstance(held.get("base"), DTensor):
                held["base"] = held["base"].to_local()
            result = method(self, matrix.full_tensor())
            if held.get("base") is not None:
                held["base"] = DTensor.from_local(held["base"], mesh, replicated, run_check=False)
            return DTensor.from_local(result, mesh, replicated, run_check=False)

        return made

    kind = parametrizations._Orthogonal
    kind.forward, kind.right_inverse = whole(kind.forward), whole(kind.right_inverse)


@cache
def pair_complex() -> None:
    """``view_as_real`` of a DTensor lies as that does: DTensor's dispatcher gathers it where the last dim is in unequal parts, and what
    optimizers of complex weights write there is lost, without a word."""
    from torch.distributed.tensor import DTensor

    def paired(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (tensor,) = args
        stride = (*(2 * step for step in tensor.stride()), 1)
        local, shape = operator(tensor._local_tensor), (*tensor.shape, 2)
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=torch.Size(shape), stride=stride)

    DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten.view_as_real.default, paired)


@cache
def detach_in_place() -> None:
    """A DTensor detached in place stays itself.

    In torch 2.11 DTensor has no rule for it. A redistribution of a parameter without gradients ends with it. On the whole tensor it would
    redistribute again, without end.
    """
    from torch.distributed.tensor import DTensor

    def itself(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0]  # autograd has taken it out of its graph by now

    DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten.detach_.default, itself)


@cache
def reduce_odd_parts() -> None:
    """Maxima and minima of a DTensor are computed of the whole tensor where some rank has no part, or several.

    Where a rank has no part torch raises on that rank alone, and the others wait for it. The place of the largest of all is looked for in
    the whole however it is split: torch 2.11 fails to gather it.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def has_empty_part(tensor: Any) -> bool:
        least = list(tensor.shape)
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if placement.is_shard():
                least[placement.dim] -= -(-least[placement.dim] // size) * (size - 1)
        return tensor.numel() > 0 and any(extent <= 0 for extent in least)

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places = operator in (aten.argmax.default, aten.argmin.default) and argument_of(operator, "dim", args, kwargs, None) is None
        if places or any(isinstance(item, DTensor) and (has_blocks(item) or has_empty_part(item)) for item in leaves_of(args)):
            return in_whole(operator, args, kwargs)
        if operator in torchs:
            return torchs[operator](operator, args, kwargs)
        return as_torch_does(operator, args, kwargs)

    aten, torchs = torch.ops.aten, dict(handlers)
    for operator in (
        aten.max.default, aten.min.default, aten.max.dim, aten.min.dim, aten.amax.default, aten.amin.default, aten.aminmax.default,
        aten.argmax.default, aten.argmin.default, aten.linalg_vector_norm.default, aten._foreach_norm.Scalar,
    ):  # fmt: skip
        handlers[operator] = run


@cache
def choose_rules() -> None:
    """Where DTensor's own rule of an operator is none, or is wrong, another way is taken (``_propagate_op_sharding_dispatch_slow_path``).

    DTensor's dispatcher asks for a rule once for each operator, layout and shape, and keeps it; what is computed another way is asked for
    each time. The ways, in this order:

    - What is still to be reduced over ranks is reduced first, but for linear operators of sums: torch adds up parts of norms as if they
      were sums, and takes some elementwise operators for linear.
    - A loss is made of its formula. torch runs it on each rank's part, where a mean is that of the part: gradients are too large by the
      number of ranks, and a rank without a target that counts has none.
    - Views that join or split dims are of the whole where a rank holds several parts of a dim, or parts differ. A sum over no dims is one
      over all.
    - What else has no rule of its own is done with whole tensors, on all ranks alike, and what was written to is cut again. Anomaly
      detection looks for NaN so; weights are normalised so. ``torch.stack([grad.isfinite().all() for ...])`` is made so where some weights
      are whole: what holds on all ranks is a product over them, and DTensor makes no parts of one. Views are left to torch's error, since
      what is written to them would be lost.
    - What draws numbers is done so too where torch has no generator that all ranks share: on CPUs, each rank would draw its own for what
      all hold, and ranks of one seed the same for their parts.
    - Where torch's rules take a tensor in blocks for whole, as in 2.11, it is gathered before all but what goes element by element. So are
      unequal parts: there each rank weighs the rules by the size of its own part, and two may choose different ones.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._random import is_rng_supported_mesh

    dispatcher, blocks_are_known = DTensor._op_dispatcher, knows_blocks()
    usual, rules = dispatcher._propagate_op_sharding_dispatch_slow_path, dispatcher.sharding_propagator
    for operator in WITH_NEW_RULES:
        rules.op_strategy_funcs.pop(operator, None)

    def has_rule(operator: Any) -> bool:
        tables = (rules.op_strategy_funcs, rules.op_single_dim_strategy_funcs, rules.op_to_rules)
        return torch.Tag.pointwise in operator.tags or any(operator in table for table in tables)

    def propagate(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], info: Any, *rest: Any) -> Any:
        tensors = [item for item in leaves_of((args, kwargs)) if isinstance(item, DTensor)]
        if unreduced := [item for item in tensors if must_be_reduced(item, operator, args)]:
            for tensor in unreduced:
                reduce_partial(tensor)
            return operator(*args, **kwargs)
        if operator.namespace == "aten" and (not has_rule(operator) or means_over_parts(operator, args, kwargs)):
            return by_formula(operator, args, kwargs)
        if operator.namespace == "aten" and draws(operator) and not is_rng_supported_mesh(tensors[0].device_mesh):
            return by_whole(operator, args, kwargs)
        regroups = operator in REGROUPING and any(map(is_odd, tensors))
        if regroups or argument_of(operator, "dim", args, kwargs, None) == []:
            return by_whole(operator, args, kwargs)
        if not blocks_are_known and not goes_by_element(operator) and any(map(is_odd, tensors)):
            return by_gathered(operator, args, kwargs)
        try:
            made = usual(operator, args, kwargs, info, *rest)
            if not any(moved(info, made)) and not replaces(operator, args, made):
                return made
        except (NotImplementedError, RuntimeError):
            if operator.namespace != "aten" or is_view(operator):
                raise
        return in_whole(operator, args, kwargs)

    def by_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_view(operator):
            raise NotImplementedError(f"DTensor has no rule for {operator} of such parts")
        return in_whole(operator, args, kwargs)

    def is_odd(tensor: Any) -> bool:
        return has_blocks(tensor) or has_unequal_parts(tensor)

    def by_gathered(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operator is _aten.t.default:  # a view of the same memory, by the rule of views, which is right
            return _aten.transpose.int(args[0], 0, -1)
        if operator._schema.is_mutable:
            return in_whole(operator, args, kwargs)
        odd = {id(item) for item in leaves_of((args, kwargs)) if isinstance(item, DTensor) and is_odd(item)}
        args, kwargs = map_tensors(lambda item: on_all(whole_of(item), item.device_mesh) if id(item) in odd else item, (args, kwargs))
        return operator(*args, **kwargs)

    def replaces(operator: Any, args: tuple[Any, ...], made: Any) -> bool:
        """Whether what is written in place is to lie otherwise, which torch refuses later on, before 2.13."""
        first, after = operator._schema.arguments[:1], getattr(getattr(made, "output_spec", None), "placements", None)
        written = any(item.alias_info and item.alias_info.is_write for item in first) and operator is not torch.ops.aten.squeeze_.dim
        return written and isinstance(args[0], DTensor) and after is not None and args[0].placements != after

    def moved(info: Any, made: Any) -> Iterator[bool]:
        """Whether an argument is to become a product over ranks, or a sum where it is another, which torch does not know how to make."""
        if getattr(made, "needs_redistribute", False):
            for held, wanted in zip(info.flat_args_schema, leaves_of(made.redistribute_schema.args_schema), strict=False):
                pairs = zip(getattr(held, "placements", ()), getattr(wanted, "placements", ()), strict=False)
                ends = [(one, other) for one, other in pairs if one != other and other.is_partial()]
                yield any(one.is_partial() or other.reduce_op == "product" for one, other in ends)

    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate
    torch._C._clear_DTensor_sharding_propagator_cache()  # of what was computed with DTensors before


ALIKE_FOR_PARTS = {
    _aten.stack.default, _aten.cat.default, _aten.linalg_vector_norm.default, _aten.detach.default, _aten.clone.default,
    _aten.alias.default,
}  # fmt: skip
"""Operators that do the same to parts of a norm or of a maximum as to the whole."""


REGROUPING = {_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default, _aten.reshape.default}
"""Views that join or split dims. torch's rule follows one contiguous part of a dim."""


def _overloads(names: str) -> set[Any]:
    kinds = ("default", "Tensor", "Scalar")
    return {getattr(getattr(_aten, name), kind) for name in names.split() for kind in getattr(_aten, name).overloads() if kind in kinds}


WITH_NEW_RULES = {_aten.constant_pad_nd.default, _aten.index_put.default, _aten._index_put_impl_.default}
"""Operators that torch 2.13 has other rules of, in another table. Those of 2.11 are wrong: they pad each part of a split dim, and take
what is written into a split dim for split like it."""

LIKE_ELEMENTWISE = _overloads(
    "detach alias clone copy_ _to_copy zero_ fill_ empty_like zeros_like ones_like full_like permute unsqueeze"
) | {_aten.transpose.int}
"""Operators that go element by element, though torch does not call them so, and views that keep each dim as it is."""

LINEAR = _overloads("add add_ sub sub_ neg neg_ clone detach alias copy_ _to_copy mul mul_ div div_")
"""Elementwise operators that torch applies to sums that are still to be made over ranks; products and quotients are linear in the first."""
PRODUCTS = _overloads("mul mul_ div div_")


def goes_by_element(operator: Any) -> bool:
    """Whether what an operator makes of a part is the part of what it makes of the whole, wherever the part lies."""
    of_lists = operator.name().startswith(("aten::_foreach_", "aten::_fused_"))
    return torch.Tag.pointwise in operator.tags or operator in LIKE_ELEMENTWISE or of_lists


def knows_blocks() -> bool:
    """Whether DTensor's rules see that a dim with a strided shard is split (``is_tensor_dim_sharded``).

    In torch 2.11 they see ``Shard`` only. They reduce, cut and multiply what each rank holds of a dim in blocks as if it were all of it.
    """
    from torch.distributed.tensor._ops.utils import is_tensor_dim_sharded

    return bool(is_tensor_dim_sharded(SimpleNamespace(placements=(strided_shard(0, 2),)), 0))


def must_be_reduced(tensor: Any, operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether a DTensor is still to be reduced over ranks, and an operator of its parts would not be one of the whole."""
    from torch.distributed.tensor import Partial

    partial = [placement for placement in tensor.placements if placement.is_partial()]
    if any(type(placement) is not Partial or placement.reduce_op not in ("sum", "avg") for placement in partial):
        return operator not in ALIKE_FOR_PARTS
    linear = operator in LINEAR and not (operator in PRODUCTS and tensor is args[1])
    elementwise = torch.Tag.pointwise in operator.tags or operator.name().startswith("aten::_foreach_")
    return bool(partial) and (elementwise or operator._schema.is_mutable) and not linear


def means_over_parts(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator is a loss, or a loss's gradient, with a mean in it."""
    return bool(argument_of(operator, "reduction", args, kwargs, 0) == 1)


def by_formula(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss as torch decomposes it, each step of it on DTensors; any other operator on whole tensors.

    Not all that torch decomposes comes to the same values: attention has no normalisers then, which its backward reads.

    Raises:
        NotImplementedError: a view, whose memory would be another's.
    """
    from torch._decomp import decomposition_table

    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
        return operator.decompose(*args, **kwargs)
    if is_view(operator):
        raise NotImplementedError(f"DTensor has no rule for {operator}")
    formula = decomposition_table.get(operator)
    if formula is not None and argument_of(operator, "reduction", args, kwargs, None) is not None:
        try:
            return formula(*args, **kwargs)
        except Exception:  # it makes plain tensors; what the user got wrong is said below
            pass
    return in_whole(operator, args, kwargs)


@cache
def take_plain_in_backward() -> None:
    """Plain tensors that a derivative's formula makes are taken as the same on all ranks, where DTensor refuses them beside DTensors.

    Autograd makes zeros where nobody read a part of ``x.chunk(2)``, and indices for ``trace``. What a hook or another function of Python
    gives is refused as before: it may differ by rank.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def comes_of_formula() -> bool:
        if torch._C._current_graph_task_id() == -1:
            return False
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_name != "_engine_run_backward":
            name = frame.f_globals["__name__"]
            if not name.startswith(f"{__package__}.") and name.partition(".")[0] != "torch":
                return False
            frame = frame.f_back
        return True

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [item for item in leaves_of(args) if isinstance(item, torch.Tensor)]
        if any(not isinstance(item, DTensor) and item.numel() != 1 for item in tensors) and comes_of_formula():
            mesh = next(item.device_mesh for item in tensors if isinstance(item, DTensor))
            args = map_tensors(lambda item: item if isinstance(item, DTensor) else on_all(item, mesh), args)
            return operator(*args, **kwargs)
        return as_torch_does(operator, args, kwargs)

    for operator in (
        _aten.cat.default, _aten.where.self, _aten.index_fill.int_Tensor, _aten.scatter_add.default, _aten.scatter.src,
        _aten.index_put.default,
    ):  # fmt: skip
        handlers.setdefault(operator, run)


@cache
def say_how_to_compare() -> None:
    """A comparison of a DTensor with a plain tensor, predictions with labels, says how they are compared; torch's words name no way.

    What an operator compares within itself (``one_hot``, with a row of numbers) is no user's.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return as_torch_does(operator, args, kwargs)
        except RuntimeError as error:
            if "got mixed" not in str(error):
                raise
            message = "got mixed torch.Tensor and DTensor in a comparison: one is split over ranks, the other plain"
            hint = "compile(..., outputs='full') for whole results, or make the plain one a DTensor: distribute_tensor(y, x.device_mesh)"
            raise UsageError(message, hint) from error

    for operator in (_aten.eq.Tensor, _aten.ne.Tensor, _aten.lt.Tensor, _aten.le.Tensor, _aten.gt.Tensor, _aten.ge.Tensor):
        handlers.setdefault(operator, run)


@cache
def reduce_looked_up() -> None:
    """Rows that ranks looked up in their parts of a table are reduced at once, and a table that is a sum over ranks before.

    torch keeps which rows a rank has beside the placement, for the next call too, which fails where the first is not reduced yet. So does a
    look-up along a dim that two axes split, which is done with the whole table. In torch 2.11 ranks that share the rows to look up between
    them take them from what each has of the sum.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        table, dim = args[0], argument_of(operator, "dim", args, kwargs, 0)
        reduce_partial(table)
        placements = table.placements if isinstance(table, DTensor) else ()
        if sum(split_factor_of(placement) is not None and placement.dim == dim % table.dim() for placement in placements) > 1:
            return in_whole(operator, args, kwargs)
        made = as_torch_does(operator, args, kwargs)
        reduce_partial(made)
        return made

    for operator in (_aten.embedding.default, _aten.gather.default, _aten.index_select.default):
        handlers.setdefault(operator, run)


@cache
def convolve_in_whole() -> None:
    """A convolution of split tensors is done in whole: torch's own handler knows one axis along the width, and of other splits it fails on
    some ranks, while others wait."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [item for item in leaves_of(args) if isinstance(item, DTensor)]
        if all(placement.is_replicate() for tensor in tensors for placement in tensor.placements):
            return torchs[operator](operator, args, kwargs)
        return in_whole(operator, args, kwargs)

    torchs = {operator: handlers[operator] for operator in (_aten.convolution.default, _aten.convolution_backward.default)}
    handlers.update(dict.fromkeys(torchs, run))


@cache
def format_numbers() -> None:
    """``f"{norm:.3f}"`` of what ``clip_grad_norm_`` returns is the number, as of any tensor without dims; so are those of ``tolist()``."""
    from torch.distributed.tensor import DTensor

    plain: Any = DTensor.__format__

    def formatted(self: Any, spec: str) -> str:
        return format(self.item(), spec) if spec and self.dim() == 0 else plain(self, spec)

    DTensor.__format__ = formatted
    DTensor.tolist = lambda self: self.full_tensor().tolist()
