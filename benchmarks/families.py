"""The models of ``benchmarks/models.py``: families of four libraries and of plain torch, small, from configurations.

A row names a family, its library, and a function of the mode that gives a ``Target``. In training a model returns its own loss where it
has one (``labels``), is given a usual one where that is how it is trained, and else its outputs' gradients are inputs of the plan.
Sizes are the least that keep a family's own structure: two layers, dims that four ranks divide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.target import Target

Mode = Literal["train", "inference"]
BATCH, SEQ, VOCAB, CLASSES = 4, 16, 128, 8


@dataclass(frozen=True)
class Family:
    """One row: ``build(mode)`` gives the model with example inputs of real values."""

    name: str
    library: str
    build: Callable[[Mode], Target]


# --- transformers -----------------------------------------------------------------------------------------------------

_DECODER: Mapping[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION: Mapping[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8,
}  # fmt: skip


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape or (BATCH, SEQ))


def _image(size: int = 32) -> Tensor:
    return torch.randn(BATCH, 3, size, size)


def _transformer(kind: str, head: str, config: Mapping[str, Any], inputs: Callable[[Mode], dict[str, Any]]) -> Callable[[Mode], Target]:
    """A model of a head (``AutoModelFor...``) from a configuration; where a sub-configuration is wanted it is given as a dictionary."""

    def build(mode: Mode) -> Target:
        import transformers

        settings = transformers.AutoConfig.for_model(kind, **config)
        model = getattr(transformers, f"AutoModel{head}").from_config(settings)
        return Target(model, (), inputs(mode), None, ())

    return build


def _text(mode: Mode) -> dict[str, Any]:
    tokens = _tokens()
    return {"input_ids": tokens} | ({"labels": tokens} if mode == "train" else {})


def _classified(mode: Mode) -> dict[str, Any]:
    return {"input_ids": _tokens()} | ({"labels": torch.randint(2, (BATCH,))} if mode == "train" else {})


def _masked(mode: Mode) -> dict[str, Any]:
    return {"attention_mask": torch.ones(BATCH, SEQ, dtype=torch.int64), **_text(mode)}


def _translated(mode: Mode) -> dict[str, Any]:
    tokens = _tokens()
    return {"input_ids": tokens} | ({"labels": _tokens()} if mode == "train" else {"decoder_input_ids": _tokens(BATCH, 8)})


def _seen(mode: Mode) -> dict[str, Any]:
    return {"pixel_values": _image()} | ({"labels": torch.randint(2, (BATCH,))} if mode == "train" else {})


_OWN: Mapping[str, Sequence[str]] = {
    "xlnet": ("max_position_embeddings",), "swin": ("num_attention_heads", "num_hidden_layers"),
}  # fmt: skip
"""Settings that a family has not, or by another name."""


def _causal(kind: str, name: str = "", **config: Any) -> Family:
    return Family(name or kind, "transformers", _transformer(kind, "ForCausalLM", {**_DECODER, **config}, _text))


def _encoder(kind: str, inputs: Callable[[Mode], dict[str, Any]] = _masked, head: str = "ForMaskedLM", **config: Any) -> Family:
    settings = {key: value for key, value in _DECODER.items() if key not in ("num_key_value_heads", *_OWN.get(kind, ()))}
    return Family(kind, "transformers", _transformer(kind, head, {**settings, **config}, inputs))


def _seeing(kind: str, **config: Any) -> Family:
    settings = {key: value for key, value in _VISION.items() if key not in _OWN.get(kind, ())}
    return Family(kind, "transformers", _transformer(kind, "ForImageClassification", {**settings, **config}, _seen))


_LLAVA_VISION = {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32}


def _llava(mode: Mode) -> dict[str, Any]:
    tokens = torch.cat([torch.full((BATCH, 16), VOCAB - 1), _tokens(BATCH, 8).clamp(max=VOCAB - 2)], 1)
    return {"input_ids": tokens, "pixel_values": _image()} | ({"labels": tokens} if mode == "train" else {})


def _speech(mode: Mode) -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 1600)} | ({"labels": torch.randint(2, (BATCH,))} if mode == "train" else {})


def _whisper(mode: Mode) -> dict[str, Any]:
    mel = {"input_features": torch.randn(BATCH, 16, 32)}
    return mel | ({"labels": _tokens(BATCH, 8)} if mode == "train" else {"decoder_input_ids": _tokens(BATCH, 8)})


def _clip(mode: Mode) -> dict[str, Any]:
    return {"input_ids": _tokens(), "pixel_values": _image()} | ({"return_loss": True} if mode == "train" else {})


_MOE: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_SEQ2SEQ: Mapping[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
_GPT: Mapping[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8}
_BACKBONE: Mapping[str, Any] = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic",
    "out_features": ["stage2"],
}  # fmt: skip

TRANSFORMERS: tuple[Family, ...] = (
    _causal("gpt2", **_GPT),
    _causal("llama"),
    _causal("mistral", sliding_window=8),
    _causal("qwen2"),
    _causal("qwen3", head_dim=8),
    _causal("gemma2", head_dim=8, query_pre_attn_scalar=8),
    _causal("gemma3_text", head_dim=8, query_pre_attn_scalar=8, sliding_window=8),
    _causal("phi3"),
    _causal("olmo2"),
    _causal("granite"),
    _causal("cohere"),
    _causal("stablelm"),
    _causal("falcon", new_decoder_architecture=True, num_kv_heads=2),
    _causal("opt", ffn_dim=64, word_embed_proj_dim=32),
    _causal("bloom", n_layer=2, n_head=4),
    _causal("mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    _causal("gptj", **_GPT),
    _causal("gpt_neox"),
    _causal("gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8),
    _causal("mamba", state_size=8),
    _causal("mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    _causal("rwkv", attention_hidden_size=32, context_length=64),
    _causal("mixtral", num_local_experts=8, num_experts_per_tok=2),
    _causal("qwen2_moe", num_experts=8, shared_expert_intermediate_size=32, **_MOE),
    _causal("qwen3_moe", num_experts=8, head_dim=8, **_MOE),
    _causal("deepseek_v2", **_MOE, **_LATENT),
    _causal("deepseek_v3", **_MOE, **_LATENT),
    _causal("gpt_oss", head_dim=8, num_local_experts=8, num_experts_per_tok=2, sliding_window=8),
    _encoder("bert"),
    _encoder("roberta"),
    _encoder("distilbert", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    _encoder("albert", embedding_size=16),
    _encoder("electra", embedding_size=16),
    _encoder("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    _encoder("modernbert", local_attention=8, classifier_pooling="mean", cls_token_id=1, sep_token_id=2),
    _encoder("fnet", _text),
    _encoder("xlnet", _text, "ForCausalLM", d_model=32, n_layer=2, n_head=4, d_inner=64),
    Family("t5", "transformers", _transformer("t5", "ForSeq2SeqLM", {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0}, _translated)),
    Family("bart", "transformers", _transformer("bart", "ForSeq2SeqLM", _SEQ2SEQ, _translated)),
    Family("whisper", "transformers", _transformer("whisper", "ForSpeechSeq2Seq", {
        **_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 64}, _whisper)),
    Family("wav2vec2", "transformers", _transformer("wav2vec2", "ForAudioClassification", {
        **_DECODER, "conv_dim": [16, 16], "conv_kernel": [10, 4], "conv_stride": [5, 4], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
        "mask_time_prob": 0.0, "layerdrop": 0.0}, _speech)),
    _seeing("vit"),
    _seeing("beit"),
    _seeing("swin", embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=2, patch_size=4),
    _seeing("convnext", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    _seeing("segformer", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16),
    Family("detr", "transformers", _transformer("detr", "ForObjectDetection", {
        **_SEQ2SEQ, "num_queries": 8, "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False,
        "backbone_config": _BACKBONE}, lambda _: {"pixel_values": _image()})),
    Family("clip", "transformers", _transformer("clip", "", {
        "text_config": {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}, "vision_config": dict(_VISION),
        "projection_dim": 16}, _clip)),
    Family("llava", "transformers", _transformer("llava", "ForImageTextToText", {
        "text_config": {**_DECODER, "model_type": "llama"}, "vision_config": _LLAVA_VISION, "image_token_id": VOCAB - 1,
        "vision_feature_layer": -1}, _llava)),
)  # fmt: skip


# --- torchvision and timm ---------------------------------------------------------------------------------------------


def _first(outputs: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of the class scores, alone, under ``out`` or first of several."""
    scores = outputs["out"] if isinstance(outputs, dict) else outputs[0] if isinstance(outputs, tuple) else outputs
    return F.cross_entropy(scores, labels)


def _pictured(library: str, name: str, image: int = 64, pixels: bool = False, **options: Any) -> Family:
    """An image model by its registered name; ``pixels``: a class for each pixel."""

    def build(mode: Mode) -> Target:
        if library == "timm":
            import timm

            model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        else:
            import torchvision

            model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
        labels = torch.randint(CLASSES, (BATCH, image, image) if pixels else (BATCH,))
        return Target(model, (_image(image),), {}, *((_first, (labels,)) if mode == "train" else (None, ())))

    return Family(name, library, build)


TORCHVISION: tuple[Family, ...] = (
    _pictured("torchvision", "resnet18"),
    _pictured("torchvision", "vgg11_bn", dropout=0.0),
    _pictured("torchvision", "mobilenet_v3_small"),
    _pictured("torchvision", "efficientnet_b0"),
    _pictured("torchvision", "shufflenet_v2_x0_5"),
    _pictured("torchvision", "squeezenet1_1"),
    _pictured("torchvision", "densenet121"),
    _pictured("torchvision", "googlenet", aux_logits=False, init_weights=False),
    _pictured("torchvision", "regnet_y_400mf"),
    _pictured("torchvision", "convnext_tiny"),
    _pictured("torchvision", "swin_t"),
    _pictured("torchvision", "maxvit_t", 224),
    _pictured("torchvision", "lraspp_mobilenet_v3_large", pixels=True, weights_backbone=None),
)
TIMM: tuple[Family, ...] = (
    _pictured("timm", "mixer_s32_224", img_size=64),
    _pictured("timm", "poolformer_s12"),
    _pictured("timm", "eva02_tiny_patch14_224", 56, img_size=56),
    _pictured("timm", "xcit_nano_12_p16_224", img_size=64),
    _pictured("timm", "coat_tiny", img_size=64),
    _pictured("timm", "levit_128s", 64, img_size=64),
    _pictured("timm", "dm_nfnet_f0"),
    _pictured("timm", "hrnet_w18_small"),
)


# --- diffusers --------------------------------------------------------------------------------------------------------


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


# --- plain torch, as users write it -----------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Two LSTM layers under spectral and weight norm as they were written before parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.rnn = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(tokens))
        return self.head(hidden).flatten(0, 1)


class Recommender(nn.Module):
    """Bags of categories by ``embedding_bag``, crossed with dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(VOCAB, 16, mode=mode) for mode in ("sum", "mean")])
        self.dense = nn.Linear(8, 16)
        self.top = nn.Linear(16 + 3, CLASSES)

    def forward(self, features: Tensor, categories: Tensor) -> Tensor:
        parts = torch.stack([self.dense(features), *(bag(categories) for bag in self.bags)], 1)
        row, column = torch.triu_indices(3, 3, 1)
        crossed = (parts @ parts.mT)[:, row, column]
        return self.top(torch.cat([parts[:, 0], crossed], 1))


def _plain(name: str, model: Callable[[], nn.Module], inputs: Callable[[], tuple[Tensor, ...]], labels: Callable[[], Tensor]) -> Family:
    def build(mode: Mode) -> Target:
        return Target(model(), inputs(), {}, *((F.cross_entropy, (labels(),)) if mode == "train" else (None, ())))

    return Family(name, "torch", build)


class Translator(nn.Module):
    """``nn.Transformer`` with the masks that its tutorial gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, src_key_padding_mask=source == 0)
        return self.head(hidden).flatten(0, 1)


TORCH: tuple[Family, ...] = (
    _plain("nn.Transformer", Translator, lambda: (_tokens(), _tokens(BATCH, 8)), lambda: _tokens(BATCH * 8)),
    _plain("nn.LSTM", Recurrent, lambda: (_tokens(BATCH, 8),), lambda: _tokens(BATCH * 8)),
    _plain("dlrm", Recommender, lambda: (torch.randn(BATCH, 8), _tokens(BATCH, 4)), lambda: torch.randint(CLASSES, (BATCH,))),
)

FAMILIES: tuple[Family, ...] = (*TRANSFORMERS, *TORCHVISION, *TIMM, *DIFFUSERS, *TORCH)
