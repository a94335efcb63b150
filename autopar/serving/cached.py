"""A causal model that keeps its cache itself: the cache's tensors are buffers, which the forward changes.

So a cache is planned as any buffer is: its specs are chosen with those of the weights, its memory counts, it lies as planned between calls
and is never gathered. The object that the model knows as its cache is put around the buffers anew in each call, so whatever class it is of,
the tensors in it may be changed in place or replaced; what it counts in Python would be lost, and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar import torch_compat
from autopar.errors import CaptureError, UsageError
from autopar.importer.arguments.containers import closed, opened
from autopar.importer.stand_ins.fake_weights import fake_weights

MakeCache = Callable[[int], Any]
"""Function from a number of tokens to a cache for them, as the model takes it in ``past_key_values`` or ``cache``."""
ARGUMENTS = ("past_key_values", "cache")
"""Names of the argument that takes a cache: until transformers 5.23, and from 5.24 on."""
NAME = "cache"
"""Name of the submodule that holds the cache's tensors."""


def cached(model: nn.Module, batch: int, length: int, cache: MakeCache | None = None, device: str = "cpu") -> nn.Module:
    """The model with a cache of its own, of ``length`` tokens for ``batch`` rows, all zeros: to be planned and run like any other.

    Its parameters, by the same names, are the model's; its cache's tensors are buffers ``cache.*``. Its forward is
    ``(input_ids [batch, n], attention_mask [batch, length], position_ids [batch, n]) -> tokens [batch, 1]``: the most likely tokens after
    the last column, int64. Of the mask, zeros say which places of the cache are padding; places not yet filled may be ones.

    Args:
        model: takes ``input_ids, attention_mask, position_ids`` and ``past_key_values`` or ``cache``, and gives logits
            ``[batch, n, vocabulary]``, or an object with ``logits``: as causal models of transformers do.
        cache: makes a cache that begins as zeros; for models of transformers their ``StaticCache``.
        device: where the cache's tensors are; ``meta`` needs no memory and is enough to plan.

    Raises:
        UsageError: a model without a cache. CaptureError: a cache that counts in Python.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}", "give a causal model, an nn.Module")
    if cache is not None and not callable(cache):
        raise UsageError(f"cache is a {type(cache).__name__}", "give a function of the length that makes a cache")
    taken = inspect.signature(model.forward).parameters
    missing = [*(["input_ids"] if "input_ids" not in taken else []), *(["past_key_values"] if not set(ARGUMENTS) & set(taken) else [])]
    if missing:
        message = f"the forward of {type(model).__name__} takes no {' and no '.join(missing)}: it is no model with a cache"
        raise UsageError(message, "give a causal model as transformers has them; one that keeps its cache in buffers is planned as it is")
    if hasattr(model, NAME) and not isinstance(getattr(model, NAME), CacheTensors):
        raise UsageError(f"{type(model).__name__} has an attribute {NAME!r}, the name of what holds the cache", "rename it")
    if batch < 1 or length < 1:
        raise UsageError(f"a cache of {length} tokens for a batch of {batch}", "give whole numbers from 1 on")
    like = _filled(model, cache or partial(_static_cache, model), batch, length)
    tree = torch_compat.map_tensors(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device), opened(like))
    return _with_cache(model, CacheTensors(tree, like))


def _with_cache(model: nn.Module, tensors: CacheTensors) -> nn.Module:
    """The model, its submodules shared, with these tensors as its cache."""
    made = model.__class__.__new__(model.__class__)
    made.__dict__.update(model.__dict__)
    made.__dict__["_modules"] = {**model._modules, NAME: tensors}
    kind: Any = type(model)
    made.__class__ = kind if isinstance(getattr(model, NAME, None), CacheTensors) else _class_of(kind)
    return made


def argument_of(taken: Container[str]) -> str:
    """The argument of a forward that takes the cache, of the names that it takes."""
    return next(name for name in ARGUMENTS if name in taken)


@lru_cache
def _class_of(kind: Any) -> Any:
    """The model's class with a forward that knows of the cache."""
    taken = inspect.signature(kind.forward).parameters
    argument = argument_of(taken)
    further = {name: value for name, value in {"use_cache": True, "logits_to_keep": 1}.items() if name in taken}

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        tensors: CacheTensors = getattr(self, NAME)
        cache = tensors.closed()
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        known = {name: value for name, value in given.items() if name in taken}
        result = kind.forward(self, input_ids=input_ids, **{argument: cache}, **known, **further)
        tensors.take(cache)
        logits = result if isinstance(result, Tensor) else result.logits
        return logits[:, -1:].argmax(-1)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__})


class CacheTensors(nn.Module):
    """The tensors of a cache as buffers, by the path at which the cache has them.

    Args:
        tree: of ``containers.opened``.
        like: the cache that it is of.
    """

    def __init__(self, tree: Any, like: Any) -> None:
        super().__init__()
        self._of = (like,)
        for path, tensor in _leaves(tree):
            self._holder(path).register_buffer(path[-1], tensor, persistent=False)

    def closed(self) -> Any:
        """A cache around the buffers."""
        (like,) = self._of
        held = {path: self._held(path) for path, _ in _leaves(opened(like))}
        return closed(_rebuilt(opened(like), held), like)

    def take(self, cache: Any) -> None:
        """Writes into the buffers what a call put in their places.

        Raises:
            CaptureError: the call changed something else of the cache, which the next would not know of.
        """
        (like,) = self._of
        before, after = _counts(like), _counts(cache)
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        new = dict(_leaves(opened(cache)))
        held = {path: self._held(path) for path, _ in _leaves(opened(like))}
        shapes = [".".join(path) for path, tensor in held.items() if path not in new or new[path].shape != tensor.shape]
        if changed or shapes or len(new) != len(held):
            added = sorted(".".join(path) for path in set(new) - set(held))
            what = ", ".join((changed or shapes or added)[:3])
            message = f"a call changes {what} of the cache, a {type(cache).__name__}: no value of a tensor of fixed shape"
            raise CaptureError(message, "use a cache whose tensors are whole from the beginning, and which counts in a tensor")
        for path, tensor in held.items():
            if new[path] is not tensor:
                tensor.copy_(new[path])

    def _holder(self, path: tuple[str, ...]) -> nn.Module:
        holder: nn.Module = self
        for name in path[:-1]:
            if name not in holder._modules:
                holder.add_module(name, nn.Module())
            holder = holder._modules[name]
        return holder

    def _held(self, path: tuple[str, ...]) -> Tensor:
        tensor = self._holder(path)._buffers[path[-1]]
        assert tensor is not None
        return tensor


def _leaves(tree: Any) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The tensors of an opened cache by path."""
    found, _ = torch_compat.flatten_with_paths(tree)
    return ((path, leaf) for path, leaf in found if isinstance(leaf, Tensor))


def _rebuilt(tree: Any, held: Mapping[tuple[str, ...], Tensor]) -> Any:
    """An opened cache with other tensors."""
    known = {id(tensor): held[path] for path, tensor in _leaves(tree)}
    return torch_compat.map_tensors(lambda tensor: known[id(tensor)], tree)


def _counts(value: Any, path: str = "", within: tuple[int, ...] = ()) -> dict[str, Any]:
    """What a cache holds beside tensors, by path."""
    if isinstance(value, (bool, int, float, str)):
        return {path: value}
    if isinstance(value, (Tensor, nn.Module, type)) or id(value) in within:
        return {}
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    items = items or getattr(value, "__dict__", {}).items()
    found: dict[str, Any] = {}
    for name, item in items:
        found.update(_counts(item, f"{path}.{name}" if path else str(name), (*within, id(value))))
    return found


def _filled(model: nn.Module, make: MakeCache, batch: int, length: int) -> Any:
    """A cache as it is when all its tensors are there, which many make in the first call only: one is made with fake weights.

    Raises:
        UsageError: what is made holds no tensors.
    """
    mode = torch_compat.fake_mode()
    with fake_weights(model, mode, train=False), mode, torch.no_grad():
        cache = make(length)
        if not _allocated(cache):
            given = {argument_of(inspect.signature(model.forward).parameters): cache}
            model(input_ids=torch.zeros(batch, 1, dtype=torch.int64), **given)
        tree = opened(cache)
    if next(_leaves(tree), None) is None:
        message = f"the cache of {type(model).__name__}, a {type(cache).__name__}, holds no tensors"
        raise UsageError(message, "give cache=, a function that makes one")
    return closed(torch_compat.map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tree), cache)


def _allocated(cache: Any) -> bool:
    """Whether a cache of transformers has made its tensors; one of another class makes them at once."""
    return bool(getattr(cache, "is_initialized", True))


def _static_cache(model: nn.Module, length: int) -> Any:
    """The static cache of transformers; windows that slide over it are left to the masks, since those of the cache count in Python.

    Raises:
        UsageError: the model is none of transformers.
    """
    config = getattr(model, "config", None)
    try:
        from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer
    except ImportError:
        config = None
    if config is None:
        hint = "give cache=, a function of the length that makes the cache that the model takes"
        raise UsageError(f"{type(model).__name__} is no model of transformers, so its cache is not known", hint)
    cache = StaticCache(config=config, max_cache_len=length)
    sliding = [isinstance(layer, StaticSlidingWindowLayer) for layer in cache.layers]
    cache.layers = [StaticLayer(length) if slides else layer for slides, layer in zip(sliding, cache.layers, strict=True)]
    return cache
