"""Writes to DTensors and to views of them reach the part that a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from autopar.errors import UsageError
from autopar.torch_compat.dtensor_rules import _aten
from autopar.torch_compat.placements import dtensor_like
from autopar.torch_compat.tensors import dispatch_mode, draws, leaves_of, map_tensors, storage_key
from autopar.torch_compat.whole_tensors import as_torch_does, cut_into, on_all, whole_of


@cache
def detach_local_parts() -> None:
    """``detach`` of a DTensor detaches its part (``_custom_op_handlers`` of DTensor's dispatcher).

    Autograd detaches each gradient that it stores. The dispatcher takes twice as long: half a millisecond more a step for 100 weights.
    Under ``torch.compile`` of a whole step, autograd calls this too: Dynamo is told to pass it over.
    """
    from torch._dynamo.eval_frame import skip_code
    from torch.distributed.tensor import DTensor

    def detach(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return dtensor_like(args[0]._local_tensor.detach(), args[0])

    for function in (detach, dtensor_like):
        skip_code(function.__code__)
    DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten.detach.default, detach)


@cache
def write_where_masked() -> None:
    """``dtensor[mask] = number`` writes into each rank's part where its part of the mask says so, as Rprop does.

    DTensor's dispatcher takes such a mask for whole on every rank, and has no way to cut it (``index_put_``).
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, (mask, *more), value, *rest = args
        masked = not more and isinstance(mask, DTensor) and mask.dtype == torch.bool and mask.shape == tensor.shape and value.dim() == 0
        if masked and isinstance(tensor, DTensor) and not any(placement.is_partial() for placement in tensor.placements):
            here = mask.redistribute(placements=tensor.placements)._local_tensor
            number = value.full_tensor() if isinstance(value, DTensor) else value
            operator(tensor._local_tensor, [here], number, *rest, **kwargs)
            return tensor
        return as_torch_does(operator, args, kwargs)

    handlers.setdefault(torch.ops.aten.index_put_.default, write)


@cache
def write_through_views() -> None:
    """``dtensor[0].zero_()``, ``dtensor.grad[:5] = 0`` and the like write into the DTensor where the dim is split too, on all ranks alike.

    DTensor's dispatcher gathers what such a view is taken of, and what is written into that is lost, without a word. Here the whole is made
    once more, written into, and cut again.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    Taken = tuple[tuple[Any, tuple[Any, ...], dict[str, Any], int | None], ...]

    class View(DTensor):
        """What was taken ``of`` a DTensor whose memory it does not share, and how."""

        of: Any
        taken: Taken

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return see(func, args, kwargs or {}, lambda: super(View, cls).__torch_dispatch__(func, types, args, kwargs))

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return self.detach().clone()

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self.detach().clone().__reduce_ex__(protocol)

    def see(operator: Any, args: Any, kwargs: dict[str, Any], usual: Callable[[], Any]) -> Any:
        """What an operator makes that reads or writes a view."""
        if written := written_by(operator, args):
            return write(operator, args, kwargs) if written[0] is args[0] else write_each(operator, args, kwargs, written)
        made, first = usual(), args[0] if args else None
        if isinstance(first, View) and any(item.alias_info for item in operator._schema.returns):
            note(made, first.of, first.taken, (operator, args[1:], kwargs))
        return made

    class Seeing(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return see(func, args, kwargs or {}, lambda: func(*args, **(kwargs or {})))

    def called(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Seeing(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def assign(self: Any, index: Any, value: Any) -> None:
        with Seeing():
            torch.Tensor.__setitem__(self, index, value)

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):  # it asks no class of DTensors what an operator does
        View.__torch_function__, DTensor.__setitem__ = classmethod(called), assign

    def note(made: Any, of: Any, before: Taken, taken: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
        several = isinstance(made, (list, tuple))
        for index, one in enumerate(made if several else [made]):
            if isinstance(one, DTensor) and one is not of:
                one.__class__ = View
                one.of, one.taken = of, (*before, (*taken, index if several else None))

    def written_by(operator: Any, args: tuple[Any, ...]) -> list[Any]:
        pairs = zip(operator._schema.arguments, args, strict=False)
        given = [one for argument, one in pairs if argument.alias_info and argument.alias_info.is_write]
        return [one for one in leaves_of(given) if isinstance(one, View)]

    @torch.no_grad()
    def write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        view, of = args[0], args[0].of
        if draws(operator):
            message = f"{operator} draws for a part of a DTensor that lies as {list(of.placements)}: each rank would draw its own"
            raise UsageError(message, "draw for the whole DTensor, before the model is compiled or in its forward")
        whole = whole_of(of).clone()
        here = whole
        for taken, more, named, index in view.taken:
            here = taken(here, *more, **named)
            here = here if index is None else here[index]
        operator(here, *map_tensors(whole_of, args[1:]), **map_tensors(whole_of, kwargs))
        cut_into(of, whole)
        cut_into(view, here)
        return view

    def write_each(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]) -> Any:
        """Of lists (``_foreach_mul_``): what the operator makes of copies is written into one after another."""
        copies = {id(one): one.detach().clone() for one in leaves_of((args, kwargs)) if isinstance(one, View)}
        given, named = map_tensors(lambda item: copies.get(id(item), item), (args, kwargs))
        made = operator(*given, **named)
        for one in written:
            write(aten.copy_.default, (one, copies[id(one)]), {})
        return made

    def look(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del handlers[operator]
        try:
            made = operator(*args, **kwargs)
        except RuntimeError:  # of unequal parts, or along a dim that is split
            if not isinstance(args[0], DTensor):
                raise
            mesh = args[0].device_mesh
            made = map_tensors(lambda item: on_all(item, mesh), operator(whole_of(args[0]), *args[1:], **kwargs))
        finally:
            handlers[operator] = look
        one = made[0] if isinstance(made, (list, tuple)) else made
        if type(args[0]) is DTensor and storage_key(one._local_tensor) != storage_key(args[0]._local_tensor):
            note(made, args[0], (), (operator, args[1:], kwargs))
        return made

    aten = torch.ops.aten
    for operator in (
        aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.diagonal.default, aten.view.default,
        aten._reshape_alias.default, aten.unfold.default, aten.unbind.int, aten.expand.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    ):  # fmt: skip
        handlers.setdefault(operator, look)


@cache
def reshape_in_place() -> None:
    """``squeeze_`` and its like give a DTensor its new shape: torch changes what lies below, and the DTensor keeps the shape it had."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    plain: Any = torch.Tensor.data

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, made = args[0], views[operator](*args, **kwargs)
        plain.__set__(tensor, made)
        tensor._local_tensor, tensor._spec = made._local_tensor, made._spec
        return tensor

    views = {
        _aten.squeeze_.default: _aten.squeeze.default, _aten.squeeze_.dim: _aten.squeeze.dim, _aten.squeeze_.dims: _aten.squeeze.dims,
        _aten.unsqueeze_.default: _aten.unsqueeze.default, _aten.transpose_.default: _aten.transpose.int, _aten.t_.default: _aten.t.default,
    }  # fmt: skip
    handlers.update(dict.fromkeys(views, run))


@cache
def assign_data() -> None:
    """``dtensor.data = other`` gives it the part of the other, placed as it is; torch leaves it with the part it had, without a word."""
    from torch.distributed.tensor import DTensor

    plain: Any = torch.Tensor.data

    def assign(self: Any, value: Any) -> None:
        if not isinstance(value, DTensor):
            hint = "write into it (copy_), or make a DTensor of what is assigned (distribute_tensor)"
            raise UsageError(f"a plain tensor {list(value.shape)} is assigned to .data of a DTensor, of which each rank holds a part", hint)
        if value.placements != self.placements and value.device_mesh == self.device_mesh:
            value = value.detach().redistribute(placements=self.placements)
        plain.__set__(self, value)
        self._local_tensor, self._spec = value._local_tensor, value._spec

    DTensor.data = property(plain.__get__, assign)
