"""Plain torch over pictures and volumes, and models that draw them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.families.row import BATCH, CLASSES, Family, classified, pictures, trained_by


class Volumes(nn.Module):
    """A U-Net of three dims: strided convolutions down, transposed ones up, instance norm, skips."""

    @staticmethod
    def block(into: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv3d(into, out, 3, padding=1), nn.InstanceNorm3d(out, affine=True), nn.LeakyReLU(0.01))

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(1, 8), self.block(8, 16)])
        self.bottom, self.pool = self.block(16, 32), nn.MaxPool3d(2)
        self.up = nn.ModuleList([nn.ConvTranspose3d(32, 16, 2, 2), nn.ConvTranspose3d(16, 8, 2, 2)])
        self.merge, self.head = nn.ModuleList([self.block(32, 16), self.block(16, 8)]), nn.Conv3d(8, 2, 1)

    def forward(self, scan: Tensor) -> Tensor:
        x, skips = scan, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


def overlap(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy and the Dice loss."""
    chances, truth = scores.softmax(1), F.one_hot(labels, scores.shape[1]).movedim(-1, 1).float()
    dims = (0, *range(2, scores.ndim))
    dice = (2 * (chances * truth).sum(dims) + 1) / ((chances + truth).sum(dims) + 1)
    return F.cross_entropy(scores, labels) + 1 - dice.mean()


class Autoencoder(nn.Module):
    """A variational autoencoder as its first example has it: the sample is drawn in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mean, self.spread = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.enter(x.view(-1, 64)))
        mean, spread = self.mean(hidden), self.spread(hidden)
        drawn = mean + torch.randn_like(mean) * torch.exp(0.5 * spread) if self.training else mean
        return self.decode(drawn), mean, spread


def evidence(outputs: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    """The summed reconstruction and divergence."""
    made, mean, spread = outputs
    return F.binary_cross_entropy(made, x.view(-1, 64), reduction="sum") - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())


class Codebook(nn.Module):
    """A VQ-VAE whose codes follow by moving averages, with the straight-through estimator."""

    def __init__(self, codes: int = 32, width: int = 8) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, width, 4, 2, 1))
        self.decode = nn.Sequential(nn.ConvTranspose2d(width, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.zeros(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(image).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z.shape[-1])
        apart = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.pow(2).sum(1)
        nearest = apart.argmin(1)
        chosen = F.embedding(nearest, self.codes).view_as(z)
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(nearest, len(self.codes)).type(flat.dtype)
                self.counts.mul_(0.99).add_(one_hot.sum(0), alpha=0.01)
                self.sums.mul_(0.99).add_(one_hot.t() @ flat, alpha=0.01)
                total = self.counts.sum()
                counts = (self.counts + 1e-5) / (total + len(self.codes) * 1e-5) * total
                self.codes.copy_(self.sums / counts.unsqueeze(1))
        commitment = F.mse_loss(z, chosen.detach())
        passed = z + (chosen - z).detach()
        return self.decode(passed.permute(0, 3, 1, 2)), commitment


def rebuilt(outputs: tuple[Tensor, Tensor], image: Tensor) -> Tensor:
    """The reconstruction and a quarter of the commitment."""
    return F.mse_loss(outputs[0], image) + 0.25 * outputs[1]


class Denoising(nn.Module):
    """DDPM's training step: noise is added by a schedule of buffers, and predicted by a small network that knows the time."""

    def __init__(self, steps: int = 100) -> None:
        super().__init__()
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0)
        self.register_buffer("signal", kept.sqrt())
        self.register_buffer("noise", (1 - kept).sqrt())
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.enter, self.leave = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))

    def forward(self, image: Tensor, step: Tensor, noise: Tensor) -> Tensor:
        mixed = self.signal[step].view(-1, 1, 1, 1) * image + self.noise[step].view(-1, 1, 1, 1) * noise
        angle = step[:, None] * torch.exp(torch.arange(8) * (-math.log(1e4) / 8))
        time = self.time(torch.cat([angle.sin(), angle.cos()], -1))[:, :, None, None]
        hidden = self.enter(mixed)
        return self.leave(hidden + self.middle(hidden + time))


class Perceiver(nn.Module):
    """Learned latents read an input of any length by cross-attention, twice with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(8, 32) * 0.02)
        self.enter = nn.Linear(11, 32)
        self.read, self.think = (nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])
        self.feed, self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), nn.Linear(32, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        batch, _, height, width = image.shape
        grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij"), -1)
        waves = (grid.unsqueeze(-1) * math.pi * torch.tensor([1.0, 4.0])).flatten(2)
        place = torch.cat([waves.sin(), waves.cos()], -1).expand(batch, -1, -1, -1)
        data = self.norms[0](self.enter(torch.cat([image.movedim(1, -1), place], -1).flatten(1, 2)))
        x = self.latents.expand(batch, -1, -1)
        for _ in range(2):
            x = x + self.read(self.norms[1](x), data, data, need_weights=False)[0]
            normed = self.norms[2](x)
            x = x + self.think(normed, normed, normed, need_weights=False)[0]
            x = x + self.feed(self.norms[3](x))
        return self.head(x.mean(1))


class Capsules(nn.Module):
    """Dynamic routing: three rounds, their logits without gradient but in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.primary = nn.Conv2d(3, 16, 5, 2), nn.Conv2d(16, 32, 5, 2)
        self.route = nn.Parameter(torch.randn(1, 4 * 25, CLASSES, 8, 8) * 0.1)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        square = (x**2).sum(-1, keepdim=True)
        return square * x / ((1 + square) * torch.sqrt(square + 1e-8))

    def forward(self, image: Tensor) -> Tensor:
        low = self.primary(F.relu(self.conv(image))).view(image.size(0), 4, 8, -1)
        low = self.squash(low.transpose(2, 3).reshape(image.size(0), -1, 8))
        votes = (self.route @ low[:, :, None, :, None]).squeeze(-1)
        logits, fixed = torch.zeros(*votes.shape[:3], 1), votes.detach()
        for _ in range(2):
            made = self.squash((logits.softmax(2) * fixed).sum(1, keepdim=True))
            logits = logits + (fixed * made).sum(-1, keepdim=True)
        return self.squash((logits.softmax(2) * votes).sum(1)).norm(dim=-1)


def margins(lengths: Tensor, labels: Tensor) -> Tensor:
    """The margin loss of capsules."""
    truth = F.one_hot(labels, CLASSES)
    return (truth * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - truth) * F.relu(lengths - 0.1) ** 2).sum(1).mean()


class Siamese(nn.Module):
    """One encoder, three pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.PReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(32, 16),
        )  # fmt: skip

    def forward(self, anchor: Tensor, same: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoder(anchor), self.encoder(same), self.encoder(other)


def _class() -> Tensor:
    return torch.randint(CLASSES, (BATCH,))


VISION: tuple[Family, ...] = (
    trained_by(overlap, "unet 3d", Volumes, lambda: (torch.randn(BATCH, 1, 8, 8, 8),), lambda: torch.randint(2, (BATCH, 8, 8, 8))),
    trained_by(evidence, "vae", Autoencoder, lambda: (torch.rand(8, 8, 8),), lambda: torch.rand(8, 8, 8)),
    trained_by(rebuilt, "vq-vae moving codes", Codebook, lambda: (pictures(16),), lambda: pictures(16)),
    trained_by(F.mse_loss, "ddpm", Denoising, lambda: (pictures(16), torch.randint(100, (BATCH,)), pictures(16)), lambda: pictures(16)),
    classified("perceiver", Perceiver, lambda: (pictures(8),), _class),
    trained_by(margins, "capsules", Capsules, lambda: (pictures(),), _class),
    trained_by(lambda made: F.triplet_margin_loss(*made), "siamese", Siamese, lambda: tuple(pictures(16) for _ in range(3)), None),
)  # fmt: skip
