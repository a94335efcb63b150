"""The norm that ``torch.nn.utils.clip_grad_norm_`` clips by, where gradients are spread over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

Join = Callable[[Sequence[torch.Tensor], Callable[[Sequence[torch.Tensor]], torch.Tensor], float], torch.Tensor | None]
_JOINING: WeakKeyDictionary[Any, Callable[[], Join | None]] = WeakKeyDictionary()


def join_total_norms(owner: Any, join: Callable[[], Join | None]) -> None:
    """Has a module's gradients counted with those of other ranks when a total norm is taken.

    ``torch.nn.utils.clip_grad._get_total_norm`` is what both ``clip_grad_norm_`` and ``get_total_norm`` call. Without this each stage would
    clip by the norm of its own gradients, without a word.

    Args:
        owner: the module; when it is gone, so is this.
        join: gives the function, or None when the module is gone. It takes tensors, the norm of some, and the order of the norm.
    """
    _install()
    _JOINING[owner] = join


@cache
def _install() -> None:
    from torch.nn.utils import clip_grad

    plain = clip_grad._get_total_norm

    def total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        for joining in list(_JOINING.values()):
            join = joining()
            found = None if join is None else join(given, lambda some: plain(some, norm_type, False, foreach), float(norm_type))
            if found is not None:
                if error_if_nonfinite and not bool(found.isfinite()):
                    raise RuntimeError("The total norm of the gradients of all stages is not finite, so they cannot be clipped")
                return found
        return plain(given, norm_type, error_if_nonfinite, foreach)

    clip_grad._get_total_norm = total_norm
    torch.nn.utils.get_total_norm = total_norm
