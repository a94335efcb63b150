"""Families of diffusers; their outputs' gradients are inputs of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.target import Target
from benchmarks.families.row import BATCH, Family, Mode


def _diffusing(name: str, config: Mapping[str, Any], inputs: Callable[[], dict[str, Any]]) -> Family:
    def build(mode: Mode) -> Target:
        import diffusers

        return Target(getattr(diffusers, name)(**config), (), inputs(), None, ())

    return Family(name, "diffusers", build)


_BLOCKS: Mapping[str, Any] = {"block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}


def _latent(size: int = 8, channels: int = 4) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def _steps() -> Tensor:
    return torch.randint(1000, (BATCH,))


DIFFUSERS: tuple[Family, ...] = (
    _diffusing("UNet2DModel", {
        "sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        **_BLOCKS,
    }, lambda: {"sample": _latent(16, 3), "timestep": _steps()}),
    _diffusing("UNet2DConditionModel", {
        "sample_size": 16, "cross_attention_dim": 32, "attention_head_dim": 8, **_BLOCKS,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }, lambda: {"sample": _latent(16), "timestep": _steps(), "encoder_hidden_states": torch.randn(BATCH, 8, 32)}),
    _diffusing("AutoencoderKL", {
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, **_BLOCKS,
    }, lambda: {"sample": _latent(16, 3)}),
    _diffusing("VQModel", {
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "num_vq_embeddings": 64, **_BLOCKS,
    }, lambda: {"sample": _latent(16, 3)}),
    _diffusing("DiTTransformer2DModel", {
        "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8, "norm_num_groups": 4,
        "num_embeds_ada_norm": 10,
    }, lambda: {"hidden_states": _latent(), "timestep": _steps(), "class_labels": torch.randint(10, (BATCH,))}),
    _diffusing("SD3Transformer2DModel", {
        "sample_size": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4, "in_channels": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": 32, "pooled_projection_dim": 16, "pos_embed_max_size": 16,
    }, lambda: {"hidden_states": _latent(), "encoder_hidden_states": torch.randn(BATCH, 8, 32),
                "pooled_projections": torch.randn(BATCH, 16), "timestep": _steps()}),
    _diffusing("FluxTransformer2DModel", {
        "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8),
    }, lambda: {"hidden_states": torch.randn(BATCH, 16, 4), "encoder_hidden_states": torch.randn(BATCH, 8, 32),
                "pooled_projections": torch.randn(BATCH, 16), "timestep": torch.rand(BATCH), "img_ids": torch.zeros(16, 3),
                "txt_ids": torch.zeros(8, 3)}),
)  # fmt: skip
