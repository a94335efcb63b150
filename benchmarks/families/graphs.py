"""Plain torch over sets, points, graphs and tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.families.row import BATCH, CLASSES, VOCAB, Family, classified, token_ids, trained_by


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


def _edges() -> Tensor:
    return torch.randint(8, (2, 24))


def _classes() -> Tensor:
    return torch.randint(CLASSES, (8,))


def _class() -> Tensor:
    return torch.randint(CLASSES, (BATCH,))


GRAPHS: tuple[Family, ...] = (
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
)  # fmt: skip
