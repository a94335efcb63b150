"""Image models of torchvision and timm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.target import Target
from benchmarks.families.row import BATCH, CLASSES, Family, Mode, pictures


def _first(outputs: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of the class scores, alone, under ``out`` or first of several."""
    scores = outputs["out"] if isinstance(outputs, dict) else outputs[0] if isinstance(outputs, tuple) else outputs
    return F.cross_entropy(scores, labels)


def _pictured(
    library: str, name: str, image: int = 64, pixels: bool = False, make: Callable[[], nn.Module] | None = None, **options: Any
) -> Family:
    """An image model by its registered name, or, where that cannot be made small, by ``make``; ``pixels``: a class for each pixel."""

    def build(mode: Mode) -> Target:
        if make is not None:
            model = make()
        elif library == "timm":
            import timm

            model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        else:
            import torchvision

            model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
        labels = torch.randint(CLASSES, (BATCH, image, image) if pixels else (BATCH,))
        return Target(model, (pictures(image),), {}, *((_first, (labels,)) if mode == "train" else (None, ())))

    return Family(name, library, build)


def _vgg() -> nn.Module:
    from torchvision.models.vgg import VGG, make_layers

    model = VGG(make_layers([16, "M", 32, "M", 512], batch_norm=True), num_classes=CLASSES, init_weights=False, dropout=0.0)
    model.classifier = nn.Sequential(nn.Linear(512 * 7 * 7, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    return model


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=8, block_config=(2, 2), num_init_features=16, num_classes=CLASSES)


def _efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    stages = [(1, 3, 1, 16, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 2)]
    return EfficientNet([MBConvConfig(*stage, 1.0, 1.0) for stage in stages], dropout=0.0, num_classes=CLASSES)


def _regnet() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    return RegNet(BlockParams.from_init_params(depth=4, w_0=16, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25), num_classes=CLASSES)


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=CLASSES)


def _swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=CLASSES)


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((64, 64), stem_channels=16, partition_size=4, block_channels=[16, 32], block_layers=[1, 1], head_dim=8,
                  stochastic_depth_prob=0.0, num_classes=CLASSES)  # fmt: skip


def _shufflenet() -> nn.Module:
    from torchvision.models import ShuffleNetV2

    return ShuffleNetV2([2, 2, 2], [16, 32, 64, 64, 64], num_classes=CLASSES)


def _mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(num_classes=CLASSES, img_size=64, patch_size=16, num_blocks=2, embed_dim=32)


def _poolformer() -> nn.Module:
    from timm.models.metaformer import GroupNorm1, MetaFormer

    return MetaFormer(num_classes=CLASSES, depths=(1, 1, 1, 1), dims=(16, 32, 32, 64), downsample_norm=None, mlp_act=nn.GELU, mlp_bias=True,
                      norm_layers=GroupNorm1, layer_scale_init_values=1e-5, res_scale_init_values=None, use_mlp_head=False)  # fmt: skip


TORCHVISION: tuple[Family, ...] = (
    _pictured("torchvision", "resnet18"),
    _pictured("torchvision", "vgg_bn", make=_vgg),
    _pictured("torchvision", "mobilenet_v3_small"),
    _pictured("torchvision", "efficientnet", make=_efficientnet),
    _pictured("torchvision", "shufflenet_v2", make=_shufflenet),
    _pictured("torchvision", "squeezenet1_1"),
    _pictured("torchvision", "densenet", make=_densenet),
    _pictured("torchvision", "googlenet", aux_logits=False, init_weights=False),
    _pictured("torchvision", "regnet_y", make=_regnet),
    _pictured("torchvision", "torchvision_convnext", make=_convnext),
    _pictured("torchvision", "torchvision_swin", make=_swin),
    _pictured("torchvision", "maxvit", make=_maxvit),
    _pictured("torchvision", "lraspp_mobilenet_v3_large", pixels=True, weights_backbone=None),
)
TIMM: tuple[Family, ...] = (
    _pictured("timm", "mixer", make=_mixer),
    _pictured("timm", "poolformer", make=_poolformer),
    _pictured("timm", "eva02_tiny_patch14_224", 56, img_size=56, depth=2),
    _pictured("timm", "xcit_nano_12_p16_224", img_size=64, depth=2),
    _pictured("timm", "coat_tiny", img_size=64, serial_depths=(1, 1, 1, 1), parallel_depth=1),
    _pictured("timm", "levit_128s", img_size=64, depth=(1, 1, 1)),
    _pictured("timm", "dm_nfnet_f0", depths=(1, 1, 1, 1)),
    _pictured("timm", "hrnet_w18_small"),
)
