"""Models that people train, at full size on the meta device: targets for the command line and for ``ablation.py``.

    autopar plan benchmarks/full_size/models.py:mixtral_8x7b --mesh dp=8,tp=8

Shapes are those of the published configurations; weights are never made. They need ``pip install '.[models]'``.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.target import Target

DTYPE = torch.bfloat16


def _transformers(kind: str, head: str, inputs: dict[str, Any], **config: Any) -> Target:
    """A model of the transformers library, from a configuration alone."""
    import transformers

    settings = transformers.AutoConfig.for_model(kind, use_cache=False, **config)
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModel{head}").from_config(settings, dtype=DTYPE)
    return Target(model, (), inputs, None, ())


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.empty(batch, length, dtype=torch.int64, device="meta")


def _text(batch: int, length: int) -> dict[str, Any]:
    tokens = _tokens(batch, length)
    return {"input_ids": tokens, "labels": tokens}


def mixtral_8x7b(layers: int = 32, batch: int = 64, seq: int = 4096) -> Target:
    return _transformers(
        "mixtral", "ForCausalLM", _text(batch, seq), hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, vocab_size=32000,
        max_position_embeddings=32768, output_router_logits=False,
    )  # fmt: skip


def t5_11b(batch: int = 64, seq: int = 512) -> Target:
    inputs = {"input_ids": _tokens(batch, seq), "labels": _tokens(batch, seq)}
    return _transformers(
        "t5", "ForSeq2SeqLM", inputs, d_model=1024, d_ff=65536, d_kv=128, num_heads=128, num_layers=24,
        vocab_size=32128, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip


def whisper_large(batch: int = 256) -> Target:
    features = torch.empty(batch, 128, 3000, dtype=DTYPE, device="meta")
    return _transformers(
        "whisper", "ForSpeechSeq2Seq", {"input_features": features, "labels": _tokens(batch, 448)}, d_model=1280,
        encoder_layers=32, decoder_layers=32, encoder_attention_heads=20, decoder_attention_heads=20, encoder_ffn_dim=5120,
        decoder_ffn_dim=5120, num_mel_bins=128, vocab_size=51866, max_source_positions=1500, max_target_positions=448,
    )  # fmt: skip


def vit_huge(batch: int = 2048) -> Target:
    pictures = torch.empty(batch, 3, 224, 224, dtype=DTYPE, device="meta")
    labels = torch.empty(batch, dtype=torch.int64, device="meta")
    return _transformers(
        "vit", "ForImageClassification", {"pixel_values": pictures, "labels": labels}, hidden_size=1280, num_hidden_layers=32,
        num_attention_heads=16, intermediate_size=5120, image_size=224, patch_size=14, num_labels=1000,
    )  # fmt: skip


def deepseek_v3_like(layers: int = 8, batch: int = 64, seq: int = 4096) -> Target:
    return _transformers(
        "deepseek_v3", "ForCausalLM", _text(batch, seq), num_hidden_layers=layers, hidden_size=7168, intermediate_size=18432,
        moe_intermediate_size=2048, num_attention_heads=128, num_key_value_heads=128, n_routed_experts=256, num_experts_per_tok=8,
        vocab_size=129280, first_k_dense_replace=3,
    )  # fmt: skip


class _Denoising(torch.nn.Module):
    """A U-Net that is trained to predict noise."""

    def __init__(self, unet: torch.nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, latents: torch.Tensor, times: torch.Tensor, prompt: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        predicted = self.unet(latents, times, prompt, return_dict=False)[0]
        return torch.nn.functional.mse_loss(predicted.float(), noise.float())


def unet_sd15(batch: int = 512) -> Target:
    import diffusers

    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(
            sample_size=64, cross_attention_dim=768, attention_head_dim=8, block_out_channels=(320, 640, 1280, 1280), layers_per_block=2
        )  # fmt: skip
        model = _Denoising(unet.to(DTYPE))
        latents = torch.empty(batch, 4, 64, 64, dtype=DTYPE)
        prompt = torch.empty(batch, 77, 768, dtype=DTYPE)
        times = torch.empty(batch, dtype=torch.int64)
    return Target(model, (latents, times, prompt, torch.empty_like(latents)), {}, None, ())
