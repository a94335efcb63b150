"""The kernel of attention that torch would run on a GPU."""

from __future__ import annotations

import torch


def choose_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, *, backward: bool
) -> str:  # fmt: skip
    """``cudnn``, ``flash``, ``efficient`` or ``math``, or another name in lower case.

    ``torch._fused_sdp_choice`` is what ``scaled_dot_product_attention`` asks. Without it that would have to be guessed from the device, its
    version of cuDNN, dtypes, shapes and the user's switches.

    Args:
        mask: ``[b, h, s, t]``.
        backward: some kernels have a forward for heads that are too long for their backward.
    """
    from torch.nn.attention import SDPBackend

    if backward:
        q = q.detach().requires_grad_()
    choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, enable_gqa=q.shape[1] != k.shape[1])
    return SDPBackend(choice).name.lower().removesuffix("_attention")
