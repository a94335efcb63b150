"""Families of transformers: language, speech, vision, several at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.target import Target
from benchmarks.families.row import BATCH, SEQ, VOCAB, Family, Mode, pictures, token_ids

_DECODER: Mapping[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION: Mapping[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8,
}  # fmt: skip


def _transformer(kind: str, head: str, config: Mapping[str, Any], inputs: Callable[[Mode], dict[str, Any]]) -> Callable[[Mode], Target]:
    """A model of a head (``AutoModelFor...``) from a configuration; where a sub-configuration is wanted it is given as a dictionary."""

    def build(mode: Mode) -> Target:
        import transformers

        settings = transformers.AutoConfig.for_model(kind, **config)
        model = getattr(transformers, f"AutoModel{head}").from_config(settings)
        return Target(model, (), inputs(mode), None, ())

    return build


def _text(mode: Mode) -> dict[str, Any]:
    tokens = token_ids()
    return {"input_ids": tokens} | ({"labels": tokens} if mode == "train" else {})


def _classified(mode: Mode) -> dict[str, Any]:
    return {"input_ids": token_ids()} | ({"labels": torch.randint(2, (BATCH,))} if mode == "train" else {})


def _masked(mode: Mode) -> dict[str, Any]:
    return {"attention_mask": torch.ones(BATCH, SEQ, dtype=torch.int64), **_text(mode)}


def _translated(mode: Mode) -> dict[str, Any]:
    tokens = token_ids()
    return {"input_ids": tokens} | ({"labels": token_ids()} if mode == "train" else {"decoder_input_ids": token_ids(BATCH, 8)})


def _seen(mode: Mode) -> dict[str, Any]:
    return {"pixel_values": pictures()} | ({"labels": torch.randint(2, (BATCH,))} if mode == "train" else {})


def _filmed(mode: Mode) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 4, 3, 32, 32)} | ({"labels": torch.randint(2, (BATCH,))} if mode == "train" else {})


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
    tokens = torch.cat([torch.full((BATCH, 16), VOCAB - 1), token_ids(BATCH, 8).clamp(max=VOCAB - 2)], 1)
    return {"input_ids": tokens, "pixel_values": pictures()} | ({"labels": tokens} if mode == "train" else {})


def _speech(mode: Mode) -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 1600)} | ({"labels": torch.randint(2, (BATCH,))} if mode == "train" else {})


def _whisper(mode: Mode) -> dict[str, Any]:
    mel = {"input_features": torch.randn(BATCH, 16, 32)}
    return mel | ({"labels": token_ids(BATCH, 8)} if mode == "train" else {"decoder_input_ids": token_ids(BATCH, 8)})


def _clip(mode: Mode) -> dict[str, Any]:
    return {"input_ids": token_ids(), "pixel_values": pictures()} | ({"return_loss": True} if mode == "train" else {})


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
    _causal("olmoe", num_experts=8, **_MOE),
    _causal("llama4_text", head_dim=8, intermediate_size_mlp=64, num_local_experts=4, num_experts_per_tok=1, moe_layers=[1],
            attention_chunk_size=8, no_rope_layers=[1, 0]),
    _causal("falcon_h1", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8),
    _causal("jamba", num_experts=4, num_experts_per_tok=2, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1,
            expert_layer_period=2, expert_layer_offset=1),
    _causal("lfm2", conv_L_cache=3, layer_types=["conv", "full_attention"], block_multiple_of=8),
    _encoder("bert"),
    _encoder("roberta"),
    _encoder("distilbert", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    _encoder("albert", embedding_size=16),
    _encoder("electra", embedding_size=16),
    _encoder("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    _encoder("modernbert", local_attention=8, classifier_pooling="mean", cls_token_id=1, sep_token_id=2),
    _encoder("fnet", _text),
    _encoder("big_bird", block_size=4, num_random_blocks=1),
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
    Family("vit_mae", "transformers", _transformer("vit_mae", "ForPreTraining", {
        **_VISION, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 64}, lambda _: {"pixel_values": pictures(), "noise": torch.rand(BATCH, 16)})),
    Family("videomae", "transformers", _transformer("videomae", "ForVideoClassification", {
        **_VISION, "num_frames": 4, "tubelet_size": 2}, _filmed)),
    _seeing("segformer", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16),
    Family("detr", "transformers", _transformer("detr", "ForObjectDetection", {
        **_SEQ2SEQ, "num_queries": 8, "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False,
        "backbone_config": _BACKBONE}, lambda _: {"pixel_values": pictures()})),
    Family("clip", "transformers", _transformer("clip", "", {
        "text_config": {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}, "vision_config": dict(_VISION),
        "projection_dim": 16}, _clip)),
    Family("llava", "transformers", _transformer("llava", "ForImageTextToText", {
        "text_config": {**_DECODER, "model_type": "llama"}, "vision_config": _LLAVA_VISION, "image_token_id": VOCAB - 1,
        "vision_feature_layer": -1}, _llava)),
)  # fmt: skip
