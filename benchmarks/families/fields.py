"""Plain torch over pictures, points, graphs, tables and fields, and models that generate."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.families.row import BATCH, CLASSES, VOCAB, Family, classified, pictures, token_ids, trained_by


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


class InducedSets(nn.Module):
    """A set transformer: induced attention blocks, pooling by attention with a seed."""

    class Attend(nn.Module):
        def __init__(self, width: int = 32) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

        def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
            q, k, v = self.q(queries), self.k(keys), self.v(keys)
            q_, k_, v_ = (torch.cat(part.split(8, 2), 0) for part in (q, k, v))
            weights = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(32), 2)
            mixed = torch.cat((q_ + weights.bmm(v_)).split(q.size(0), 0), 2)
            return mixed + F.relu(self.out(mixed))

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(3, 32), nn.Linear(32, CLASSES)
        self.induced, self.seed = nn.Parameter(torch.empty(2, 1, 4, 32)), nn.Parameter(torch.empty(1, 1, 32))
        nn.init.xavier_uniform_(self.induced)
        nn.init.xavier_uniform_(self.seed)
        self.attends = nn.ModuleList([self.Attend() for _ in range(5)])

    def forward(self, points: Tensor) -> Tensor:
        x = self.enter(points)
        for number in range(2):
            summary = self.attends[2 * number](self.induced[number].repeat(x.size(0), 1, 1), x)
            x = self.attends[2 * number + 1](x, summary)
        return self.head(self.attends[4](self.seed.repeat(x.size(0), 1, 1), x)).squeeze(1)


class Points(nn.Module):
    """PointNet: a learned 3 x 3 alignment, shared layers by convolutions of one, a maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.align = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1), nn.BatchNorm1d(32), nn.ReLU())
        self.turn = nn.Linear(32, 9)
        self.shared = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 64, 1), nn.BatchNorm1d(64))
        self.head = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, points: Tensor) -> Tensor:
        found = torch.max(self.align(points), 2, keepdim=True)[0].view(-1, 32)
        turn = self.turn(found) + torch.eye(3).view(1, 9).repeat(points.size(0), 1)
        points = torch.bmm(points.transpose(2, 1), turn.view(-1, 3, 3)).transpose(2, 1)
        return self.head(torch.max(self.shared(points), 2)[0])


class NeighbourGraph(nn.Module):
    """DGCNN: edges to the nearest points by ``topk``, gathered by flat index, a maximum over neighbours."""

    @staticmethod
    def edge(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(2 * width, 16, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2))

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.ModuleList([self.edge(3), self.edge(16)])
        self.head = nn.Linear(32, CLASSES)

    def forward(self, points: Tensor, near: int = 4) -> Tensor:
        x, levels = points, []
        for edge in self.edges:
            batch, width, count = x.shape
            inner = -2 * torch.matmul(x.transpose(2, 1), x)
            square = torch.sum(x**2, dim=1, keepdim=True)
            index = (-square - inner - square.transpose(2, 1)).topk(k=near, dim=-1)[1]
            index = (index + torch.arange(batch).view(-1, 1, 1) * count).view(-1)
            rows = x.transpose(2, 1).contiguous()
            neighbours = rows.view(batch * count, -1)[index, :].view(batch, count, near, width)
            centre = rows.view(batch, count, 1, width).repeat(1, 1, near, 1)
            x = edge(torch.cat((neighbours - centre, centre), dim=3).permute(0, 3, 1, 2)).max(dim=-1)[0]
            levels.append(x)
        return self.head(F.adaptive_max_pool1d(torch.cat(levels, 1), 1).squeeze(-1))


class SampledGraph(nn.Module):
    """GraphSAGE: a fixed number of sampled neighbours, two hops, means and unit vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Embedding(VOCAB, 16)
        self.first, self.second, self.head = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, CLASSES)

    def forward(self, nodes: Tensor, near: Tensor, far: Tensor) -> Tensor:
        own, one, two = self.features(nodes), self.features(near), self.features(far)
        join = lambda layer, x, around: F.normalize(F.relu(layer(torch.cat([x, around.mean(-2)], -1))), dim=-1)  # noqa: E731
        return self.head(join(self.second, join(self.first, own, one), join(self.first, one, two)))


class GraphAttention(nn.Module):
    """GAT over a list of edges: softmax by target with ``scatter_reduce`` and ``index_add``."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.enter, self.head = heads, nn.Linear(8, 32, bias=False), nn.Linear(32, CLASSES)
        self.source, self.target = nn.Parameter(torch.randn(heads, 8) * 0.3), nn.Parameter(torch.randn(heads, 8) * 0.3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        x = self.enter(nodes).view(-1, self.heads, 8)
        scores = F.leaky_relu((x * self.source).sum(-1)[source] + (x * self.target).sum(-1)[target], 0.2)
        index = target.unsqueeze(-1).expand_as(scores)
        top = torch.full((len(x), self.heads), float("-inf")).scatter_reduce(0, index, scores.detach(), "amax")
        weights = torch.exp(scores - top[target])
        total = torch.zeros(len(x), self.heads).index_add(0, target, weights)
        weights = weights / (total[target] + 1e-16)
        mixed = torch.zeros_like(x).index_add(0, target, x[source] * weights.unsqueeze(-1))
        return self.head(F.elu(mixed.flatten(1)))


class EquivariantGraph(nn.Module):
    """EGNN: messages by distances along edges, places moved along differences."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(33, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU())
        self.node = nn.Sequential(nn.Linear(32, 16), nn.SiLU(), nn.Linear(16, 16))
        self.move, self.kinds, self.head = nn.Linear(16, 1, bias=False), nn.Embedding(8, 16), nn.Linear(16, 1)

    def forward(self, kinds: Tensor, places: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        row, column = edges
        hidden = self.kinds(kinds)
        for _ in range(2):
            apart = places[row] - places[column]
            message = self.edge(torch.cat([hidden[row], hidden[column], apart.square().sum(1, keepdim=True)], 1))
            moved = torch.zeros_like(places).scatter_add_(0, row.unsqueeze(1).expand(-1, 3), apart * self.move(message))
            places = places + moved / len(kinds)
            gathered = hidden.new_zeros(hidden.shape).scatter_add_(0, row.unsqueeze(1).expand(-1, 16), message)
            hidden = hidden + self.node(torch.cat([hidden, gathered], 1))
        return self.head(hidden), places


def placed(outputs: tuple[Tensor, Tensor], places: Tensor) -> Tensor:
    """Squared errors of places, and of energies that should be none."""
    return F.mse_loss(outputs[1], places) + outputs[0].sum().square() * 1e-3


class FactorMachine(nn.Module):
    """DeepFM: one table for all fields with offsets, the machine's square of sums, and a deep part."""

    def __init__(self, fields: tuple[int, ...] = (16, 8, 32, 8)) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(sum(fields), 8), nn.Embedding(sum(fields), 1)
        self.register_buffer("offsets", torch.tensor((0, *fields[:-1])).cumsum(0))
        self.bias, self.width = nn.Parameter(torch.zeros(1)), 8 * len(fields)
        self.deep = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, fields: Tensor) -> Tensor:
        fields = fields + self.offsets.unsqueeze(0)
        rows = self.table(fields)
        machine = 0.5 * (rows.sum(1).pow(2) - rows.pow(2).sum(1)).sum(1, keepdim=True)
        return (self.linear(fields).sum(1) + self.bias + machine + self.deep(rows.view(-1, self.width))).squeeze(1)


class TwoTowers(nn.Module):
    """Retrieval: users and bags of words of items as unit vectors, every other row of the batch is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.words = nn.Embedding(VOCAB, 16), nn.EmbeddingBag(VOCAB, 16, mode="mean", padding_idx=0)
        self.user, self.item = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, users: Tensor, words: Tensor) -> Tensor:
        user = F.normalize(self.user(self.users(users)), dim=-1)
        item = F.normalize(self.item(self.words(words)), dim=-1)
        return user @ item.t() * self.scale.exp()


def paired(scores: Tensor) -> Tensor:
    """Cross-entropy both ways against the diagonal."""
    labels = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


class CrossedTable(nn.Module):
    """Multi-gate mixture of experts over a table of numbers and categories, two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.categories = nn.ModuleList([nn.Embedding(size, 4) for size in (8, 16)])
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)])
        self.gates, self.tasks = (nn.ModuleList([nn.Linear(16, out) for _ in range(2)]) for out in (4, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        x = torch.cat([numbers, *(table(categories[:, column]) for column, table in enumerate(self.categories))], 1)
        made = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = [(gate(x).softmax(-1).unsqueeze(-1) * made).sum(1) for gate in self.gates]
        return torch.cat([task(part) for task, part in zip(self.tasks, mixed, strict=True)], 1)


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


def _edges() -> Tensor:
    return torch.randint(8, (2, 24))


def _classes() -> Tensor:
    return torch.randint(CLASSES, (8,))


def _class() -> Tensor:
    return torch.randint(CLASSES, (BATCH,))


FIELDS: tuple[Family, ...] = (
    trained_by(overlap, "unet 3d", Volumes, lambda: (torch.randn(BATCH, 1, 8, 8, 8),), lambda: torch.randint(2, (BATCH, 8, 8, 8))),
    trained_by(evidence, "vae", Autoencoder, lambda: (torch.rand(8, 8, 8),), lambda: torch.rand(8, 8, 8)),
    trained_by(rebuilt, "vq-vae moving codes", Codebook, lambda: (pictures(16),), lambda: pictures(16)),
    trained_by(F.mse_loss, "ddpm", Denoising, lambda: (pictures(16), torch.randint(100, (BATCH,)), pictures(16)), lambda: pictures(16)),
    classified("perceiver", Perceiver, lambda: (pictures(8),), _class),
    classified("set transformer", InducedSets, lambda: (torch.randn(BATCH, 8, 3),), _class),
    classified("pointnet", Points, lambda: (torch.randn(BATCH, 3, 16),), _class),
    classified("dgcnn", NeighbourGraph, lambda: (torch.randn(BATCH, 3, 16),), _class),
    classified("graphsage", SampledGraph, lambda: (token_ids(8), token_ids(8, 4), token_ids(8, 4, 4)), _classes),
    classified("gat", GraphAttention, lambda: (torch.randn(8, 8), _edges()), _classes),
    trained_by(placed, "egnn", EquivariantGraph, lambda: (torch.randint(8, (8,)), torch.randn(8, 3), _edges()), lambda: torch.randn(8, 3)),
    trained_by(F.binary_cross_entropy_with_logits, "deepfm", FactorMachine,
               lambda: (torch.randint(8, (8, 4)),), lambda: torch.rand(8).round()),
    trained_by(paired, "two towers", TwoTowers, lambda: (token_ids(8), torch.randint(VOCAB, (8, 6))), None),
    trained_by(F.mse_loss, "multi-gate experts", CrossedTable,
               lambda: (torch.randn(8, 8), torch.randint(8, (8, 2))), lambda: torch.randn(8, 2)),
    trained_by(F.mse_loss, "nerf", Radiance, lambda: (torch.randn(8, 3), torch.randn(8, 3)), lambda: torch.rand(8, 3)),
    trained_by(F.mse_loss, "siren", Sines, lambda: (torch.rand(16, 2) * 2 - 1,), lambda: torch.rand(16, 3)),
    trained_by(margins, "capsules", Capsules, lambda: (pictures(),), _class),
    trained_by(lambda made: F.triplet_margin_loss(*made), "siamese", Siamese, lambda: tuple(pictures(16) for _ in range(3)), None),
    trained_by(F.mse_loss, "neural ode", Trajectory, lambda: (torch.randn(8, 4),), lambda: torch.randn(5, 8, 4)),
    trained_by(likelihood, "flow", Flow, lambda: (torch.randn(8, 8),), None),
    trained_by(F.mse_loss, "hypernetwork", Hypernetwork,
               lambda: (torch.randint(8, (8,)), torch.randn(8, 4, 4)), lambda: torch.randn(8, 4, 2)),
    trained_by(F.mse_loss, "fourier operator", FourierOperator,
               lambda: (torch.randn(BATCH, 16, 16, 1),), lambda: torch.randn(BATCH, 16, 16)),
    trained_by(lambda value: value, "gradient penalty", Adversary, lambda: (torch.randn(8, 16), torch.randn(8, 8), torch.rand(8, 1)), None),
    trained_by(clipped, "ppo", Policy, lambda: (torch.randn(8, 8),), lambda: (torch.randint(4, (8,)), torch.randn(8))),
)  # fmt: skip
