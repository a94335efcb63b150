"""Calls of ``local_map`` and of torch's collectives in a model: what runs in their place.

The functions of ``torch.distributed``, of its ``nn.functional`` and of ``_functional_collectives`` are all rerouted here, under whichever
name they were imported. In a region they are kept (``importer.collectives.meanings``). Elsewhere tensors are whole, and they are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from string import ascii_letters
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar import torch_compat
from autopar.errors import CaptureError
from autopar.importer.collectives.axis_groups import AxisGroup, axes_of, sees_one_rank, within_capture
from autopar.importer.collectives.meanings import (
    all_gather,
    all_reduce,
    all_to_all,
    exchange_each,
    gather_each,
    reduce_scatter,
    scatter_each,
)
from autopar.importer.collectives.regions import Region, run_region, running_region
from autopar.importer.diagnosis.errors import OWN_GRADIENT, refuse_collective
from autopar.importer.rewrite.attentions import attention_replacement
from autopar.importer.rewrite.contractions import contract, einsum, linear, matmul
from autopar.importer.stand_ins.autograd_calls import run_by_operators


class RegionCalls(TorchFunctionMode):
    """While a region runs: a tensor that a collective was given to write into is read as what that made.

    Where another tensor shares its memory, its memory is written to, as torch would.
    """

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        self.sharing: dict[int, Tensor] = {}
        products: dict[str, Callable[..., Tensor]] = dict.fromkeys(("matmul", "__matmul__", "mm", "bmm", "mv"), matmul)
        products["linear"] = linear
        self.instead: Mapping[str, Callable[..., Tensor]] = {
            "scaled_dot_product_attention": self._attention,
            "einsum": self._einsum,
            **{name: partial(self._product, product) for name, product in products.items()},
        }
        """By the name of a function what runs in place of it, with ranks as a dim: ``vmap`` would flatten that into others, or loop."""

    def value(self, given: Any) -> Any:
        """What a tensor is by now."""
        return self.written.get(id(given), (None, given))[1]

    def write(self, target: Tensor, made: Tensor) -> None:
        """Gives a tensor the value that a collective made for it.

        Raises:
            CaptureError: it is of another size or dtype, or shares its memory with another tensor that cannot take the values.
        """
        if made.numel() != target.numel() or made.dtype != target.dtype:
            becomes, was = (f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in (made, target))
            raise CaptureError(f"a collective writes {becomes} into a tensor {was}", "make the tensor that it writes to of that size")
        made, current = made.reshape(target.shape), self.value(target)
        if id(current) not in self.sharing:
            self.written[id(target)] = target, made
            return
        try:
            current.copy_(made)
        except RuntimeError:  # what differs by rank has no room in what does not; autograd follows no writes into one of several views
            message = "a collective writes into a tensor that shares its memory with another one, where its values cannot be put"
            hint = "give it tensors of their own, made by torch.empty_like(x), and cut or concatenate them afterwards"
            raise CaptureError(message, hint) from None

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        args, kwargs = torch_compat.map_tensors(self.value, (args, kwargs or {}))
        instead = self.instead.get(getattr(function, "__name__", ""))
        if instead is not None:
            return instead(function, *args, **kwargs)
        result = function(*args, **kwargs)
        made = [leaf for leaf in torch_compat.leaves_of(result) if isinstance(leaf, Tensor)]
        given = [leaf for leaf in torch_compat.leaves_of((args, kwargs)) if isinstance(leaf, Tensor)] if made else []
        for one, other in ((one, other) for one in made for other in given if one is not other):
            if torch_compat.shares_memory(torch_compat.beneath_levels(one), torch_compat.beneath_levels(other)):
                self.sharing.update({id(one): one, id(other): other})
        return result

    def _product(self, product: Callable[..., Tensor], function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return product(*args, **kwargs, by=self._contract)

    def _einsum(self, function: Any, equation: str, *operands: Any) -> Tensor:
        return einsum(equation, operands[0] if isinstance(operands[0], (list, tuple)) else operands, by=self._contract)

    def _contract(self, a: Tensor, first: Sequence[str], b: Tensor, second: Sequence[str], result: Sequence[str]) -> Tensor:
        """``contract``, with a factor for each axis along which an operand differs."""
        (a, of_a), (b, of_b) = self.region.across(a), self.region.across(b)
        axes = sorted({*of_a, *of_b})
        ranks = dict(zip(axes, (letter for letter in reversed(ascii_letters) if letter not in {*first, *second, *result}), strict=False))
        names = ([ranks[axis] for axis in some] for some in (of_a, of_b, axes))
        found = contract(a, [*next(names), *first], b, [*next(names), *second], [*next(names), *result])
        return self.region.within(found, axes)

    def _attention(
        self, function: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *more: Any,
        **named: Any,
    ) -> Tensor:  # fmt: skip
        """Attention with the ranks in its batch; ``vmap`` would run it rank by rank."""
        operands = [q, k, v] if attn_mask is None else [q, k, v, attn_mask]
        axes = sorted({axis for operand in operands for axis in self.region.across(operand)[1]})
        if not axes or dropout_p > 0:
            found: Tensor = function(q, k, v, attn_mask, dropout_p, *more, **named)
            return found
        dims = q.dim()
        q, k, v = (self.region.across(operand, axes)[0] for operand in (q, k, v))
        if attn_mask is not None:
            attn_mask = self.region.across(attn_mask.reshape(*[1] * (dims - attn_mask.dim()), *attn_mask.shape), axes)[0]
        return self.region.within(attention_replacement(_never)(q, k, v, attn_mask, 0.0, *more, **named), axes)


def _never() -> NoReturn:
    raise AssertionError("attention without dropout draws no numbers")


class _Done:
    """What a call with ``async_op=True`` gives: it is over."""

    def wait(self, timeout: Any = None) -> bool:
        """As of torch's ``Work``."""
        return True

    def is_completed(self) -> bool:
        """As of torch's ``Work``."""
        return True


class Call(NamedTuple):
    """A call of a collective in a region: its arguments by name, tensors as they are by now."""

    region: Region
    given: Mapping[str, Any]

    @property
    def axes(self) -> tuple[int, ...]:
        """Of its group."""
        return axes_of(self.given["group"], self.region.mesh)

    @property
    def reduction(self) -> str:
        """``sum``, ``avg`` and so on."""
        return str(self.given.get("reduceOp", self.given.get("op"))).rpartition(".")[2].lower()

    def dim(self, name: str) -> int:
        """The dim of ``self`` that an argument says, counted from the first."""
        found: int = self.given[name] % max(1, self.given["self"].dim())
        return found


class Kept(NamedTuple):
    """What a function does in a region.

    Args:
        make: from a call to what it gives.
        into: the argument, a tensor or a list of them, that is written to; empty where there is none.
        returns: whether it gives what it made where it writes it too.
    """

    make: Callable[[Call], Any]
    into: str = ""
    returns: bool = True


def _single(name: str) -> Callable[[Call], Tensor]:
    """``all_to_all_single`` of the argument ``name``."""

    def make(call: Call) -> Tensor:
        for sizes in ("output_split_sizes", "input_split_sizes"):
            if call.given[sizes] is not None and len({*call.given[sizes]}) > 1:
                message = f"all_to_all_single with the {sizes} {list(call.given[sizes])}, which differ"
                raise CaptureError(message, "cut it in equal parts, padded where they are not: all ranks run one program")
        return all_to_all(call.region, call.given[name], call.axes)

    return make


def _reduce(name: str) -> Callable[[Call], Tensor]:
    return lambda call: all_reduce(call.region, call.given[name], call.reduction, call.axes)


def _gather(name: str) -> Callable[[Call], Tensor]:
    return lambda call: all_gather(call.region, call.given[name], 0, call.axes)


def _gather_along(call: Call) -> Tensor:
    return all_gather(call.region, call.given["self"], call.dim("gather_dim"), call.axes)


def _scatter_along(call: Call) -> Tensor:
    return reduce_scatter(call.region, call.given["self"], call.reduction, call.dim("scatter_dim"), call.axes)


def _scatter(call: Call) -> Tensor:
    return reduce_scatter(call.region, call.given["input"], call.reduction, 0, call.axes)


def _gather_each(call: Call) -> Sequence[Tensor]:
    return gather_each(call.region, call.given["tensor"], call.axes)


def _scatter_each(call: Call) -> Tensor:
    return scatter_each(call.region, call.given["input_list"], call.reduction, call.axes)


def _exchange_each(call: Call) -> Sequence[Tensor]:
    return exchange_each(call.region, call.given["input_tensor_list"], call.axes)


_FUNCTIONAL: Mapping[str, Kept] = {
    "all_reduce": Kept(_reduce("self")),
    "wait_tensor": Kept(lambda call: call.given["tensor"]),
    **dict.fromkeys((f"all_gather_{kind}{end}" for kind in ("tensor", "single") for end in ("", "_autograd")), Kept(_gather_along)),
    **dict.fromkeys((f"reduce_scatter_{kind}{end}" for kind in ("tensor", "single") for end in ("", "_autograd")), Kept(_scatter_along)),
    **dict.fromkeys(("all_to_all_single", "all_to_all_single_autograd"), Kept(_single("self"))),
}
_DIFFERENTIABLE: Mapping[str, Kept] = {
    "all_reduce": Kept(_reduce("tensor")),
    "all_gather": Kept(_gather_each),
    "_all_gather_base": Kept(_gather("input_tensor"), "output_tensor"),
    "reduce_scatter": Kept(_scatter_each, "output"),
    "all_to_all": Kept(_exchange_each, "output_tensor_list"),
    "all_to_all_single": Kept(_single("input"), "output"),
}
_WRITING: Mapping[str, Kept] = {
    "all_reduce": Kept(_reduce("tensor"), "tensor", returns=False),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), Kept(_gather("input_tensor"), "output_tensor", returns=False)),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), Kept(_scatter, "output", returns=False)),
    "all_to_all_single": Kept(_single("input"), "output", returns=False),
    "all_gather": Kept(_gather_each, "tensor_list", returns=False),
    "reduce_scatter": Kept(_scatter_each, "output", returns=False),
    "all_to_all": Kept(_exchange_each, "output_tensor_list", returns=False),
}
KEPT: Mapping[str, Mapping[str, Kept]] = {"functional": _FUNCTIONAL, "differentiable": _DIFFERENTIABLE, "writing": _WRITING}
"""By ``torch_compat.collective_modules`` and name, the functions that are kept. Versions of torch differ in which of them there are."""

REFUSED: Mapping[str, tuple[str, ...]] = {
    "functional": (
        "broadcast", "permute_tensor", "all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
    ),
    "differentiable": ("broadcast", "gather", "reduce", "scatter"),
    "writing": ("broadcast", "gather", "reduce", "scatter", "send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier"),
}
"""Those that are refused in a region too: not all ranks do the same in them."""

_RUNNING: ContextVar[RegionCalls | None] = ContextVar("autopar_region_calls", default=None)


def _kept(kept: Kept, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    calls = _RUNNING.get()
    if calls is None:
        return _elsewhere(plain, *args, **kwargs)
    bound = inspect.signature(plain).bind(*args, **kwargs)
    bound.apply_defaults()
    given = {name: [*map(calls.value, value)] if isinstance(value, list) else calls.value(value) for name, value in bound.arguments.items()}
    made = kept.make(Call(calls.region, given))
    if not kept.into:
        return made
    places = bound.arguments[kept.into]
    for place, value in [(places, made)] if isinstance(places, Tensor) else zip(places, made, strict=True):
        calls.write(place, value)
    return made if kept.returns else _Done() if given["async_op"] else None


def _refused(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if running_region() is not None:
        hint = "use all_reduce, all_gather, reduce_scatter or all_to_all"
        raise CaptureError(f"a region calls {plain.__name__}, which is not kept", hint)
    return _elsewhere(plain, *args, **kwargs)


def _refuse_function(function: type[torch.autograd.Function]) -> None:
    """Its backward is written for ranks that each have the whole gradient, while gradients here are those of the whole."""
    raise CaptureError(f"a region calls a torch.autograd.Function, {function.__name__}", OWN_GRADIENT)


def _elsewhere(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A collective where tensors are whole."""
    if sees_one_rank() or any(isinstance(given, AxisGroup) for given in (*args, *kwargs.values())):
        refuse_collective(plain.__name__)
    return plain(*args, **kwargs)


def _world_size(plain: Callable[..., int], group: Any = None) -> int:
    return group.size() if isinstance(group, AxisGroup) else plain(group)


def _local_map(
    plain: Callable[..., Any], function: Callable[..., Any], out_placements: Any, in_placements: Any, in_grad_placements: Any,
    device_mesh: Any, redistribute_inputs: bool, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """A region. Gradients are those of the whole, so that no placements of them are asked for."""
    from torch.distributed.tensor import DTensor  # for start-up time: whoever has local_map has imported it

    given = function, out_placements, in_placements, in_grad_placements, device_mesh, redistribute_inputs
    flat, structure = torch_compat.flatten_with_paths(args)
    leaves = [leaf for _, leaf in flat]
    if any(isinstance(leaf, DTensor) for leaf in leaves):
        return plain(*given, *args, **kwargs)
    if running_region() is not None:
        raise CaptureError("local_map in a region of local_map", "give one local_map the mesh of both")
    if device_mesh is None or in_placements is None:
        missing = "device_mesh" if device_mesh is None else "in_placements"
        hint = "say how each argument lies, and over which mesh: arguments are whole tensors here"
        raise CaptureError(f"local_map without {missing}", hint)
    if len(in_placements) != len(leaves):
        message = f"local_map with {len(in_placements)} in_placements for {len(leaves)} arguments"
        raise CaptureError(message, "give the placements of each, None for one that is no tensor")

    def body(region: Region, parts: list[Any]) -> Any:
        calls = RegionCalls(region)
        token = _RUNNING.set(calls)
        try:
            with torch_compat.met_functions(_refuse_function), calls:
                found = function(*torch_compat.unflatten(parts, structure), **kwargs)
        finally:
            _RUNNING.reset(token)
        return torch_compat.map_tensors(calls.value, found)

    return run_by_operators(lambda *whole: run_region(body, device_mesh, whole, in_placements, out_placements), tuple(leaves))


@cache
def _collectives() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    modules = torch_compat.collective_modules()
    kept = {modules[kind]: {name: partial(_kept, one) for name, one in some.items()} for kind, some in KEPT.items()}
    refused = {modules[kind]: dict.fromkeys(names, _refused) for kind, names in REFUSED.items()}
    asked = {modules["writing"]: {"get_world_size": _world_size}}
    return {
        getattr(module, name): route
        for table in (kept, refused, asked)
        for module, some in table.items()
        for name, route in some.items()
        if hasattr(module, name)
    }


@contextmanager
def on_one_device() -> Iterator[None]:
    """Within it, a model with ``local_map`` regions runs on whole tensors in this process, as a plan of it would on its ranks.

    In the regions, collectives are what they are between ranks. Elsewhere they are refused where their group is one of
    ``autopar.axis_mesh``, which has no ranks.
    """
    region = torch_compat.local_map_function()
    with torch_compat.rerouted({**_collectives(), **({} if region is None else {region: _local_map})}):
        yield
    if region is None and torch_compat.local_map_function() is not None:
        raise CaptureError("the model imports local_map while it runs", "import it at the top of the file")


@contextmanager
def kept_collectives() -> Iterator[None]:
    """While a model runs to be captured: the collectives of its regions are kept, others are refused."""
    with within_capture(), on_one_device():
        yield
