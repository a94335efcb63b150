"""Plain torch over fields, trajectories and densities, and models trained by losses of their own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.families.row import BATCH, Family, trained_by


class Radiance(nn.Module):
    """NeRF: positions along rays, encoded by waves, and colours composited by a cumulative product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(27, 32), nn.Linear(32 + 27, 32)
        self.density, self.colour = nn.Linear(32, 1), nn.Sequential(nn.Linear(32 + 3, 16), nn.ReLU(), nn.Linear(16, 3), nn.Sigmoid())
        self.register_buffer("waves", 2.0 ** torch.arange(4))

    def forward(self, origins: Tensor, directions: Tensor, samples: int = 8) -> Tensor:
        depth = torch.linspace(1, 4, samples)
        places = origins[:, None] + directions[:, None] * depth[:, None]
        angles = (places[..., None] * self.waves).flatten(-2)
        encoded = torch.cat([places, angles.sin(), angles.cos()], -1)
        hidden = F.relu(self.second(torch.cat([F.relu(self.first(encoded)), encoded], -1)))
        density = F.relu(self.density(hidden)).squeeze(-1)
        colour = self.colour(torch.cat([hidden, F.normalize(directions, dim=-1)[:, None].expand(-1, samples, -1)], -1))
        step = torch.cat([depth[1:] - depth[:-1], torch.tensor([1e10])])
        opaque = 1 - torch.exp(-density * step)
        passed = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-10], -1), -1)[:, :-1]
        return ((opaque * passed).unsqueeze(-1) * colour).sum(1)


class Sines(nn.Module):
    """SIREN, with weights drawn as its paper has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 3)])
        with torch.no_grad():
            for number, layer in enumerate(self.layers):
                bound = math.sqrt(6 / layer.in_features) / 30 if number else 0.5
                layer.weight.uniform_(-bound, bound)

    def forward(self, places: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            places = torch.sin(30 * layer(places))
        return self.layers[-1](places)


class Trajectory(nn.Module):
    """A neural ODE by Runge-Kutta of four stages and fixed steps."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: Tensor, steps: int = 4) -> Tensor:
        h = 1 / steps
        at = lambda time, x: self.slope(torch.cat([x, torch.full_like(x[:, :1], time)], 1))  # noqa: E731
        path = [x]
        for step in range(steps):
            t = step * h
            a = at(t, x)
            b = at(t + h / 2, x + h / 2 * a)
            c = at(t + h / 2, x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + at(t + h, x + h * c))
            path.append(x)
        return torch.stack(path)


class Flow(nn.Module):
    """Glow's pieces over vectors: activation norm, an LU-free linear mix with its log-determinant, affine coupling by masks."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(depth, 8)), nn.Parameter(torch.zeros(depth, 8))
        self.mix = nn.ParameterList([nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0]) for _ in range(depth)])
        self.nets = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(depth)])
        self.register_buffer("mask", torch.arange(8) % 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = torch.zeros(x.size(0))
        for number, (mix, net) in enumerate(zip(self.mix, self.nets, strict=True)):
            x = (x + self.shift[number]) * self.scale[number].exp()
            x = x @ mix
            scale, shift = net(x * self.mask).chunk(2, 1)
            scale = torch.tanh(scale) * (1 - self.mask)
            x = x * scale.exp() + shift * (1 - self.mask)
            volume = volume + self.scale[number].sum() + torch.slogdet(mix)[1] + scale.sum(1)
        return x, volume


def likelihood(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """Minus the mean logarithm of a normal density after a change of variables."""
    z, volume = outputs
    return (0.5 * z.square().sum(1) + 4 * math.log(2 * math.pi) - volume).mean()


class Hypernetwork(nn.Module):
    """A network that makes the weights of another, by task, applied with ``functional_call`` under ``vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks, self.make = nn.Embedding(8, 8), nn.Linear(8, 4 * 16 + 16 + 16 * 2 + 2)

    def forward(self, task: Tensor, x: Tensor) -> Tensor:
        first, bias, second, last = self.make(self.tasks(task)).split([64, 16, 32, 2], -1)

        def one(first: Tensor, bias: Tensor, second: Tensor, last: Tensor, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(F.linear(x, first.view(16, 4), bias)), second.view(2, 16), last)

        return torch.func.vmap(one)(first, bias, second, last, x)


class FourierOperator(nn.Module):
    """FNO: the lowest modes of a field are mixed by complex weights."""

    def __init__(self, width: int = 8, modes: int = 4) -> None:
        super().__init__()
        self.modes, self.enter, self.leave = modes, nn.Linear(3, width), nn.Linear(width, 1)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(width, width, modes, modes, 2) * 0.1) for _ in range(2)])
        self.local = nn.ModuleList([nn.Conv2d(width, width, 1) for _ in range(2)])

    def forward(self, field: Tensor) -> Tensor:
        batch, height, width, _ = field.shape
        rows, columns = torch.linspace(0, 1, height), torch.linspace(0, 1, width)
        grid = torch.stack([rows.view(-1, 1).expand(height, width), columns.view(1, -1).expand(height, width)], -1)
        x = self.enter(torch.cat([field, grid.expand(batch, -1, -1, -1)], -1)).permute(0, 3, 1, 2)
        for weight, local in zip(self.weights, self.local, strict=True):
            spectrum = torch.fft.rfft2(x)
            mixed = torch.zeros_like(spectrum)
            low = spectrum[:, :, : self.modes, : self.modes]
            mixed[:, :, : self.modes, : self.modes] = torch.einsum("bixy,ioxy->boxy", low, torch.view_as_complex(weight))
            x = F.gelu(torch.fft.irfft2(mixed, s=(height, width)) + local(x))
        return self.leave(x.permute(0, 2, 3, 1)).squeeze(-1)


class Adversary(nn.Module):
    """A generator and a critic in one step, with the gradient penalty of Wasserstein GANs."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, 16), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, real: Tensor, noise: Tensor, share: Tensor) -> Tensor:
        fake = self.generator(noise)
        gap = self.critic(fake).mean() - self.critic(real).mean()
        if not self.training:
            return gap
        mixed = (share * real + (1 - share) * fake).detach().requires_grad_()
        slope = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)[0]
        return gap + 10 * (slope.norm(2, dim=1) - 1).square().mean()


class Policy(nn.Module):
    """An actor and a critic, trained by PPO's clipped ratio of log-probabilities and an entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(seen)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def clipped(outputs: tuple[Tensor, Tensor], taken: tuple[Tensor, Tensor]) -> Tensor:
    """PPO's loss, the old policy being uniform; ``taken``: actions and their gains."""
    actions, gains = taken
    choice = torch.distributions.Categorical(logits=outputs[0])
    ratio = torch.exp(choice.log_prob(actions) + math.log(4))
    gain = (gains - gains.mean()) / (gains.std() + 1e-8)
    clip = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    return F.mse_loss(outputs[1], gains) * 0.5 - clip - 0.01 * choice.entropy().mean()


FIELDS: tuple[Family, ...] = (
    trained_by(F.mse_loss, "nerf", Radiance, lambda: (torch.randn(8, 3), torch.randn(8, 3)), lambda: torch.rand(8, 3)),
    trained_by(F.mse_loss, "siren", Sines, lambda: (torch.rand(16, 2) * 2 - 1,), lambda: torch.rand(16, 3)),
    trained_by(F.mse_loss, "neural ode", Trajectory, lambda: (torch.randn(8, 4),), lambda: torch.randn(5, 8, 4)),
    trained_by(likelihood, "flow", Flow, lambda: (torch.randn(8, 8),), None),
    trained_by(F.mse_loss, "hypernetwork", Hypernetwork,
               lambda: (torch.randint(8, (8,)), torch.randn(8, 4, 4)), lambda: torch.randn(8, 4, 2)),
    trained_by(F.mse_loss, "fourier operator", FourierOperator,
               lambda: (torch.randn(BATCH, 16, 16, 1),), lambda: torch.randn(BATCH, 16, 16)),
    trained_by(lambda value: value, "gradient penalty", Adversary, lambda: (torch.randn(8, 16), torch.randn(8, 8), torch.rand(8, 1)), None),
    trained_by(clipped, "ppo", Policy, lambda: (torch.randn(8, 8),), lambda: (torch.randint(4, (8,)), torch.randn(8))),
)  # fmt: skip
