"""Code that does the same with sizes that are known before the run, in place of operators whose result sizes depend on values."""

from __future__ import annotations

import linecache

_PLACES = (
    "in place of i = mask.nonzero()[:, 0] i = mask.int().argsort(descending=True, stable=True), which names those rows first and then all"
    " others: torch.where(mask[i][:, None], x[i], 0) has those alone"
)
_MASKED = (
    "in place of x[mask] torch.where(mask, x, 0), or torch.where(mask[:, None], x, 0) where the mask picks rows; its sum divided by"
    " mask.sum() is the mean"
)
_DISTINCT = (
    "in place of x.unique() s = x.sort().values, where the first of each value counts: torch.cat([s[:1] == s[:1], s[1:] != s[:-1]])"
)
_PARTS = (
    "in place of x.split(sizes.tolist()) the part that a row is of, k = (torch.arange(len(x))[:, None] >= sizes.cumsum(0)).sum(1):"
    " x.new_zeros(len(sizes), x.shape[1]).index_add(0, k, x) sums each part"
)
_FIRST = "in place of x[:int(n)] torch.where(torch.arange(len(x))[:, None] < n, x, 0)"
_REPEATED = (
    "with output_size= where their number is fixed; else in place of x.repeat_interleave(r, 0), for up to n rows, i = torch.arange(n) and"
    " x[(i[:, None] >= r.cumsum(0)).sum(1).clamp(max=len(x) - 1)], which counts where i < r.sum()"
)

REWRITES = {
    "bincount": "in place of bincount x.new_zeros(n).index_add(0, i, x.new_ones(len(i)))",
    "repeat_interleave": _REPEATED,
    "tolist": _PARTS,
    **dict.fromkeys(("index", "__getitem__", "masked_select"), _MASKED),
    **dict.fromkeys(("nonzero", "argwhere", "where"), _PLACES),
    **dict.fromkeys(("unique", "_unique2", "unique_dim", "unique_consecutive"), _DISTINCT),
    **dict.fromkeys(("item", "_local_scalar_dense", "__int__", "__index__"), _FIRST),
}
"""By the name of a function or an operator, what does the same with a known size."""


def hint_of(name: str, place: tuple[str, int] | None) -> str:
    """What to write in place of what was called at a line, whose result has a size that depends on values.

    >>> hint_of("topple", None)
    'use operators whose result sizes are known before the run, such as topk, where or a mask'
    """
    if name in ("item", "_local_scalar_dense") and place is not None and "tolist" in linecache.getline(*place):
        name = "tolist"  # which reads numbers one by one
    return f"use operators whose result sizes are known before the run, {REWRITES.get(name, 'such as topk, where or a mask')}"
