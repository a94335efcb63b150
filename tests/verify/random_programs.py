"""Programs drawn at random: views, reductions, indexing, norms, products, attention, dtypes and writes in place, of uneven sizes too.

A program is a list of lines, each a function of one or two earlier values and perhaps a weight of its own. It is drawn once, from its seed,
and printed where it fails. The same seed gives the same program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of a value, another of its shape (or the same), and the weight of the line (or the value again)."""
SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Of dims: what two axes of two ranks divide, and what they do not."""
MESHES = ("2", "4", "2x2")
FEWEST, MOST = 6, 15
"""Lines of a program."""
MOST_ELEMENTS = 4096
"""Of a value: programs are many and small."""
LARGEST = 1e3
"""Of entries: a program that grows without end compares rounding."""
HALVES = 0.1
"""Of programs compute in half precision in places."""
TOKENS = 6
"""Rows of the embedding."""


@dataclass(frozen=True)
class Line:
    """In words, the numbers of the values that it reads, and the function; ``weight`` is its shape, or empty."""

    text: str
    reads: tuple[int, int]
    run: Run
    weight: tuple[int, ...] = ()


@dataclass(frozen=True)
class Made:
    """What a kind of line makes of a shape and a dim."""

    text: str
    run: Run
    weight: tuple[int, ...] = ()


Kind = Callable[[random.Random, torch.Size, int], Made]


class Program(nn.Module):
    """Inputs ``x [rows, columns, width]`` and ``tokens [rows, columns]``; a scalar is made of the first values and the last four.

    Args:
        seed: of everything: the lines, the weights, the inputs and the mesh.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.mesh = chance.choice(MESHES)
        numbers = torch.Generator().manual_seed(seed)
        rows, columns, width = (chance.choice(SIZES) for _ in range(3))
        x = torch.randn(rows, columns, width, generator=numbers)
        self.args = (x, torch.randint(TOKENS, (rows, columns), generator=numbers))
        self.matrix = _weight((width, width), numbers)
        self.row, self.column = (nn.Parameter(torch.rand(shape, generator=numbers) + 0.5) for shape in ((width,), (columns, 1)))
        self.table = _weight((TOKENS, width), numbers)
        self.weights = nn.ParameterDict()
        self.lines: list[Line] = []
        kinds = {0: [*KINDS[0], *(HALF if chance.random() < HALVES else [])], **{least: KINDS[least] for least in (1, 2, 3)}}
        with torch.no_grad():
            values = self._begin(*self.args)
            self.first = len(values)
            wanted = chance.randint(FEWEST, MOST)
            while len(self.lines) < wanted:
                line = _draw(chance, kinds, values)
                weight = _weight(line.weight, numbers) if line.weight else values[line.reads[0]]
                made = _value(line, values, weight)
                if made is not None:
                    if line.weight:
                        self.weights[str(len(values))] = weight
                    self.lines.append(line)
                    values.append(made)
        self.ends = (*range(self.first), *range(max(self.first, len(values) - 4), len(values)))

    def _begin(self, x: Tensor, tokens: Tensor) -> list[Tensor]:
        return [x * self.row, x @ self.matrix, x * self.column, functional.embedding(tokens, self.table)]

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        values = self._begin(x, tokens)
        for number, line in enumerate(self.lines, self.first):
            one, other = (values[place] for place in line.reads)
            values.append(line.run(one, other, self.weights[str(number)] if line.weight else one))
        # of the first values too, since a norm leaves no gradient of a scale before it
        return torch.stack([values[end].tanh().square().mean().float() for end in self.ends]).sum()

    def __str__(self) -> str:
        shape = list(self.args[0].shape)
        begin = f"mesh {self.mesh}; x {shape}; v0 = x * row; v1 = x @ matrix; v2 = x * column; v3 = embedding(tokens, table)"
        lines = [
            f"v{number} = {line.text}: a v{line.reads[0]}, b v{line.reads[1]}{f', weight {list(line.weight)}' if line.weight else ''}"
            for number, line in enumerate(self.lines, self.first)
            if number in self._live()
        ]
        return "\n".join([begin, *lines, "ends: " + ", ".join(f"v{end}" for end in self.ends)])

    def _live(self) -> set[int]:
        """The values that the ends read."""
        live, waiting = set(), list(self.ends)
        while waiting:
            number = waiting.pop()
            if number not in live:
                live.add(number)
                waiting += self.lines[number - self.first].reads if number >= self.first else ()
        return live


def _weight(shape: Sequence[int], numbers: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(tuple(shape), generator=numbers) / shape[-1] ** 0.5)


def _value(line: Line, values: Sequence[Tensor], weight: Tensor) -> Tensor | None:
    """What the line makes; None where torch refuses it, or where it is empty, large, or not finite."""
    one, other = (values[place] for place in line.reads)
    try:
        made = line.run(one, other, weight)
    except (RuntimeError, IndexError, ValueError):
        return None
    sound = 0 < made.numel() <= MOST_ELEMENTS and bool(torch.isfinite(made).all()) and made.abs().max().item() < LARGEST
    return made.clone() if sound else None


def _draw(chance: random.Random, kinds: dict[int, list[Kind]], values: Sequence[Tensor]) -> Line:
    """A line that reads one of the latest values, and perhaps another of its shape."""
    one = chance.choice(range(max(0, len(values) - 5), len(values)))
    shape = values[one].shape
    dim = chance.randrange(len(shape)) if shape else 0
    other = chance.choice([place for place, value in enumerate(values) if value.shape == shape])
    made = chance.choice([kind for least, some in kinds.items() if len(shape) >= least for kind in some])(chance, shape, dim)
    return Line(made.text, (one, other), made.run, made.weight)


def _of(text: str, function: Callable[[Tensor, Tensor, int], Tensor]) -> Kind:
    """A line of a value, another of its shape, and a dim."""
    return lambda chance, shape, dim: Made(f"{text}, dim {dim}", lambda a, b, _: function(a, b, dim))


def _places(chance: random.Random, count: int, extent: int) -> Tensor:
    return torch.tensor([chance.randrange(extent) for _ in range(count)])


def _expanded(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    size = chance.choice(SIZES)
    wide = [size if place == dim else extent for place, extent in enumerate(shape)]
    return Made(f"a.mean({dim}, keepdim=True).expand({wide})", lambda a, b, _: a.mean(dim, keepdim=True).expand(wide))


def _part(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    begin = chance.randrange(shape[dim])
    length = chance.randrange(begin, shape[dim]) + 1 - begin
    return Made(f"a.narrow({dim}, {begin}, {length})", lambda a, b, _: a.narrow(dim, begin, length))


def _stepped(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    begin = chance.randrange(2)
    return Made(f"every second of dim {dim} from {begin}", lambda a, b, _: a[(slice(None),) * dim + (slice(begin, None, 2),)])


def _unflattened(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    outer = chance.choice([size for size in range(1, shape[dim] + 1) if shape[dim] % size == 0])
    return Made(f"a.unflatten({dim}, ({outer}, -1))", lambda a, b, _: a.unflatten(dim, (outer, -1)))


def _reshaped(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    count = shape.numel()
    outer = chance.choice([size for size in range(1, count + 1) if count % size == 0])
    return Made(f"a.reshape({outer}, {count // outer})", lambda a, b, _: a.reshape(outer, count // outer))


def _permuted(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    order = chance.sample(range(len(shape)), len(shape))
    return Made(f"a.permute({order})", lambda a, b, _: a.permute(order))


def _selected(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    places = _places(chance, chance.choice(SIZES), shape[dim])
    return Made(f"a.index_select({dim}, {places.tolist()})", lambda a, b, _: a.index_select(dim, places))


def _indexed(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    places = _places(chance, 2 * chance.choice((2, 3)), shape[dim]).view(2, -1)
    return Made(f"a[{places.tolist()}] of dim {dim}", lambda a, b, _: a[(slice(None),) * dim + (places,)])


def _gathered(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    places = _places(chance, shape.numel(), shape[dim]).view(shape)
    return Made(f"a.gather({dim}, random)", lambda a, b, _: a.gather(dim, places))


def _scattered(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    places = _places(chance, shape.numel(), shape[dim]).view(shape)
    return Made(f"a.scatter_add({dim}, random, b)", lambda a, b, _: a.scatter_add(dim, places, b.to(a.dtype)))


def _added_at(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    places = _places(chance, shape[dim], shape[dim])
    return Made(f"a.index_add({dim}, {places.tolist()}, b)", lambda a, b, _: a.index_add(dim, places, b.to(a.dtype)))


def _masked(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    mask = torch.tensor([chance.random() < 0.5 for _ in range(shape[-1])])
    return Made(f"a.masked_fill({mask.tolist()}, 0.5)", lambda a, b, _: a.masked_fill(mask, 0.5))


def _written(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    half = max(1, shape[dim] // 2)

    def run(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        made = a.clone()
        made.narrow(dim, 0, half).mul_(b.narrow(dim, shape[dim] - half, half).sigmoid())
        return made

    return Made(f"a, its first {half} of dim {dim} times sigmoid of b's last", run)


def _set_at(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    place = chance.randrange(shape[dim])

    def run(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        made = a.sin()
        made.select(dim, place).copy_(b.mean(dim))
        return made

    return Made(f"a.sin() with b.mean({dim}) at {place} of it", run)


def _chunk(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    count = chance.choice((2, 3))

    def run(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        chunks = a.chunk(count, dim)
        return chunks[1] - chunks[0]

    return Made(f"a.chunk({count}, {dim}), the second less the first", run)


def _linear(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    weight = (chance.choice(SIZES), shape[-1])
    return Made("linear(a, weight)", lambda a, b, weight: functional.linear(a, weight.to(a.dtype)), weight)


def _convolved(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    weight = (chance.choice(SIZES), shape[1], 3)
    return Made("conv1d(a, weight)", lambda a, b, weight: functional.conv1d(a, weight.to(a.dtype), padding=1) / 3, weight)


def _scaled(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    return Made("layer_norm(a, weight)", lambda a, b, weight: functional.layer_norm(a, weight.shape, weight.to(a.dtype)), (shape[-1],))


def _rms(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    return Made("rms_norm(a, weight)", lambda a, b, weight: functional.rms_norm(a, weight.shape, weight.to(a.dtype)), (shape[-1],))


def _grouped(chance: random.Random, shape: torch.Size, dim: int) -> Made:
    groups = chance.choice([size for size in range(1, shape[1] + 1) if shape[1] % size == 0])
    return Made(f"group_norm(a, {groups})", lambda a, b, _: functional.group_norm(a, groups))


def _attend(a: Tensor, b: Tensor, dim: int) -> Tensor:
    return functional.scaled_dot_product_attention(a[:, None], b[:, None], a[:, None], is_causal=dim == 1)[:, 0]


KINDS: dict[int, list[Kind]] = {
    0: [
        _of("a + b", lambda a, b, dim: a + b),
        _of("a * b.sigmoid()", lambda a, b, dim: a * b.sigmoid()),
        _of("a.sin()", lambda a, b, dim: a.sin()),
        _of("a + a.mean()", lambda a, b, dim: a + a.mean()),
        _of("a - a.sum().sigmoid()", lambda a, b, dim: a - a.sum().sigmoid()),
        _of("where(a > b, a, b / 2)", lambda a, b, dim: torch.where(a > b, a, b * 0.5)),
        _of("gelu(a)", lambda a, b, dim: functional.gelu(a)),
        _of("a.double()", lambda a, b, dim: a.double()),
        _of("a.float()", lambda a, b, dim: a.float()),
        _of("a.double().sin().float()", lambda a, b, dim: a.double().sin().float()),
        _of("a.flatten()", lambda a, b, dim: a.flatten()),
        _of("a.exp().clamp(max=2)", lambda a, b, dim: a.exp().clamp(max=2)),
        _of("a.sin().mul_(b).add_(a)", lambda a, b, dim: a.sin().mul_(b.tanh()).add_(a)),
        _of("a.cos().relu_()", lambda a, b, dim: a.cos().relu_()),
        _reshaped,
    ],
    1: [
        _expanded, _part, _stepped, _unflattened, _permuted, _selected, _indexed, _gathered, _scattered, _added_at, _masked, _written,
        _set_at, _chunk, _scaled, _rms, _linear,
        _of("a.softmax(dim)", lambda a, b, dim: a.softmax(dim)),
        _of("a.log_softmax(dim)", lambda a, b, dim: a.log_softmax(dim)),
        _of("a.cumsum(dim) / size", lambda a, b, dim: a.cumsum(dim) / a.shape[dim]),
        _of("a.sum(dim)", lambda a, b, dim: a.sum(dim)),
        _of("a.mean(dim)", lambda a, b, dim: a.mean(dim)),
        _of("a.amax(dim)", lambda a, b, dim: a.amax(dim)),
        _of("a - a.amax(dim)", lambda a, b, dim: a - a.amax(dim, keepdim=True)),
        _of("a / (1 + a.var(dim))", lambda a, b, dim: a / (1 + a.var(dim, keepdim=True, correction=0))),
        _of("a.logsumexp(dim)", lambda a, b, dim: a.logsumexp(dim)),
        _of("cat of a and b", lambda a, b, dim: torch.cat([a, b], dim)),
        _of("stack of a and b", lambda a, b, dim: torch.stack([a, b], dim)),
        _of("a.flip(dim)", lambda a, b, dim: a.flip(dim)),
        _of("a.roll(1, dim)", lambda a, b, dim: a.roll(1, dim)),
        _of("a.transpose(0, dim)", lambda a, b, dim: a.transpose(0, dim)),
        _of("a.sort(dim)", lambda a, b, dim: a.sort(dim).values),
        _of("b.take_along_dim(a.argsort(dim))", lambda a, b, dim: b.take_along_dim(a.argsort(dim), dim)),
        _of("layer_norm(a)", lambda a, b, dim: functional.layer_norm(a, a.shape[-1:])),
        _of("a.unsqueeze(dim)", lambda a, b, dim: a.unsqueeze(dim)),
        _of("a.select(dim, 0)", lambda a, b, dim: a.select(dim, 0)),
        _of("a.repeat_interleave(2, dim)", lambda a, b, dim: a.repeat_interleave(2, dim)),
        _of("pad(a, (1, 2))", lambda a, b, dim: functional.pad(a, (1, 2))),
        _of("normalize(a, dim)", lambda a, b, dim: functional.normalize(a, dim=dim)),
    ],
    2: [
        _of("a @ b.mT", lambda a, b, dim: a @ b.to(a.dtype).mT / a.shape[-1] ** 0.5),
        _of("a.mT @ b", lambda a, b, dim: a.mT @ b.to(a.dtype) / a.shape[-2] ** 0.5),
        _of("a.tril()", lambda a, b, dim: a.tril()),
        _of("einsum('...ab,...cb->...ac', a, b)", lambda a, b, dim: torch.einsum("...ab,...cb->...ac", a, b.to(a.dtype)) / a.shape[-1]),
    ],
    3: [
        _convolved, _grouped,
        _of("attention(a, b, a)", lambda a, b, dim: _attend(a, b.to(a.dtype), dim) if a.dim() == 3 else a.flatten(0, 1)),
        _of("batch_norm(a)", lambda a, b, dim: functional.batch_norm(a, None, None, training=True)),
        _of("max_pool1d(a)", lambda a, b, dim: functional.max_pool1d(a, 2)),
        _of("avg_pool1d(a)", lambda a, b, dim: functional.avg_pool1d(a, 2)),
        _of("einsum('abc,abd->acd', a, b)", lambda a, b, dim: torch.einsum("abc,abd->acd", a, b.to(a.dtype)) / a.shape[1] ** 0.5),
    ],
}  # fmt: skip
"""By the fewest dims of the value that they read."""
HALF: list[Kind] = [
    _of("a.bfloat16()", lambda a, b, dim: a.bfloat16()),
    _of("a.bfloat16().sin().float()", lambda a, b, dim: a.bfloat16().sin().float()),
]
"""Of a few programs: where anything is in half precision, more error is allowed in all of a program."""
