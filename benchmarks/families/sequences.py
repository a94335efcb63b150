"""Plain torch over time: language models beside the Transformer, speech, translation, forecasts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.families.row import BATCH, CLASSES, SEQ, VOCAB, Family, classified, token_ids, trained_by

WIDTH, HEADS = 32, 4


class Language(nn.Module):
    """Tokens, two residual blocks, scores of the next token."""

    def __init__(self, block: type[nn.Module], positions: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(SEQ, WIDTH) if positions else None
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for norm, block in zip(self.norms, self.blocks, strict=True):
            hidden = hidden + block(norm(hidden))
        return self.head(hidden).flatten(0, 1)


class SelectiveScan(nn.Module):
    """Mamba's mixer: a causal depthwise convolution, then a recurrence whose steps depend on the input, in a loop."""

    def __init__(self, state: int = 8, rank: int = 4) -> None:
        super().__init__()
        self.rank, self.state = rank, state
        self.enter, self.leave = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.conv = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 4, groups=2 * WIDTH, padding=3)
        self.select = nn.Linear(2 * WIDTH, rank + 2 * state, bias=False)
        self.step = nn.Linear(rank, 2 * WIDTH)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(2 * WIDTH, 1))
        self.skip = nn.Parameter(torch.ones(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        inner, gate = self.enter(x).chunk(2, dim=-1)
        inner = F.silu(self.conv(inner.transpose(1, 2))[..., :length].transpose(1, 2))
        step, write, read = self.select(inner).split([self.rank, self.state, self.state], dim=-1)
        step = F.softplus(self.step(step))
        decay = torch.exp(step.unsqueeze(-1) * -torch.exp(self.log_decay))
        written = (step * inner).unsqueeze(-1) * write.unsqueeze(2)
        state = x.new_zeros(x.shape[0], 2 * WIDTH, self.state)
        outputs = []
        for time in range(length):
            state = decay[:, time] * state + written[:, time]
            outputs.append(torch.einsum("bdn,bn->bd", state, read[:, time]))
        return self.leave((torch.stack(outputs, dim=1) + inner * self.skip) * F.silu(gate))


class TimeMix(nn.Module):
    """RWKV's time mixing: token shift, and a running weighted mean kept in logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(3, 1, 1, WIDTH))
        self.decay, self.first = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.key, self.value, self.gate, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        before = self.shift(x)
        key, value, gate = (
            layer(x * mix + before * (1 - mix)) for layer, mix in zip((self.key, self.value, self.gate), self.mix, strict=True)
        )
        above, below = torch.zeros_like(key[:, 0]), torch.zeros_like(key[:, 0])
        largest = torch.full_like(key[:, 0], -1e30)
        means = []
        for time in range(x.shape[1]):
            now, content = key[:, time], value[:, time]
            top = torch.maximum(largest, now + self.first)
            old, new = torch.exp(largest - top), torch.exp(now + self.first - top)
            means.append((old * above + new * content) / (old * below + new))
            top = torch.maximum(largest - torch.exp(self.decay), now)
            old, new = torch.exp(largest - torch.exp(self.decay) - top), torch.exp(now - top)
            above, below, largest = old * above + new * content, old * below + new, top
        return self.out(torch.sigmoid(gate) * torch.stack(means, 1))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return q, k, v

    def join(self, heads: Tensor) -> Tensor:
        return self.out(heads.transpose(1, 2).flatten(2))


class LinearAttention(_Attention):
    """Causal linear attention by cumulative sums."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        above = torch.einsum("bhtd,bhtde->bhte", q, memory)
        return self.join(above / torch.einsum("bhtd,bhtd->bht", q, k.cumsum(2)).unsqueeze(-1))


class RandomFeatures(_Attention):
    """Performer: softmax attention by positive random features, orthogonal ones."""

    def __init__(self) -> None:
        super().__init__()
        basis = torch.linalg.qr(torch.randn(WIDTH // HEADS, WIDTH // HEADS))[0]
        self.register_buffer("projection", basis * math.sqrt(WIDTH // HEADS))

    def features(self, x: Tensor) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        projected = torch.einsum("bhtd,md->bhtm", x, self.projection)
        return torch.exp(projected - x.square().sum(-1, keepdim=True) / 2 - projected.amax((-1, -2), keepdim=True).detach()) + 1e-4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = self.features(q), self.features(k)
        normaliser = 1 / (q @ k.sum(2).unsqueeze(-1))
        return self.join(q @ (k.transpose(-1, -2) @ v) * normaliser)


class Windows(_Attention):
    """Longformer's sliding windows: chunks of keys by ``unfold``, keys outside a window are masked."""

    def forward(self, x: Tensor, window: int = 4) -> Tensor:
        q, k, v = self.heads(x)
        length = x.shape[1]
        k, v = (F.pad(part, (0, 0, window, window)).unfold(2, 2 * window + 1, 1) for part in (k, v))
        scores = torch.einsum("bhtd,bhtdw->bhtw", q, k) / math.sqrt(q.shape[-1])
        place = torch.arange(length)[:, None] + torch.arange(-window, window + 1)
        scores = scores.masked_fill((place < 0) | (place >= length), float("-inf"))
        return self.join(torch.einsum("bhtw,bhtdw->bhtd", scores.softmax(-1), v))


class HashedChunks(_Attention):
    """Reformer: keys are queries; tokens are sorted by a hash of random rotations, and attend within chunks of the sorted row."""

    def __init__(self, buckets: int = 4) -> None:
        super().__init__()
        self.register_buffer("rotations", torch.randn(WIDTH // HEADS, buckets // 2))

    def forward(self, x: Tensor, chunk: int = 4) -> Tensor:
        q, _, v = self.heads(x)
        rotated = q.detach() @ self.rotations
        bucket = torch.cat([rotated, -rotated], -1).argmax(-1)
        place = torch.arange(x.shape[1], device=x.device)
        order = (bucket * x.shape[1] + place).argsort(-1)
        back = order.argsort(-1)
        take = lambda part, index: part.gather(2, index.unsqueeze(-1).expand_as(part))  # noqa: E731
        query, value = (take(part, order).unflatten(2, (-1, chunk)) for part in (q, v))
        scores = query @ F.normalize(query, dim=-1).transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.eye(chunk, dtype=torch.bool), -1e5)
        return self.join(take((scores.softmax(-1) @ value).flatten(2, 3), back))


class GroupedAlibi(nn.Module):
    """Grouped-query attention with ALiBi's slopes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1).mul(8 / HEADS))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, -1).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, HEADS // 2, -1).permute(2, 0, 3, 1, 4)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        place = torch.arange(length, device=x.device)
        bias = (place[None] - place[:, None]) * self.slopes[:, None, None]
        bias = bias.masked_fill(place[None] > place[:, None], float("-inf"))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(batch, -1, -1, -1))
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Retention(_Attention):
    """RetNet in parallel form: decays by head, group norm, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(HEADS, WIDTH)
        self.register_buffer("decay", 1 - 2.0 ** (-5 - torch.arange(HEADS)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        place = torch.arange(x.shape[1])
        apart = place[:, None] - place
        decay = torch.where(apart >= 0, self.decay[:, None, None] ** apart.clamp(min=0), 0.0)
        mixed = ((q @ k.mT * decay) @ v).transpose(1, 2).flatten(2)
        mixed = self.norm(mixed.reshape(-1, WIDTH)).view_as(x)
        return self.out(F.silu(self.gate(x)) * mixed)


class SoftMixture(nn.Module):
    """Soft mixture of experts: slots are weighted means of tokens, both ways."""

    def __init__(self, experts: int = 4, slots: int = 2) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(WIDTH, experts, slots) * 0.1)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("btd,des->btes", F.normalize(x, dim=-1), F.normalize(self.phi, dim=0))
        dispatch, combine = logits.softmax(1), logits.flatten(2).softmax(-1).view_as(logits)
        slots = torch.einsum("btes,btd->besd", dispatch, x)
        made = torch.einsum("besh,ehd->besd", F.gelu(torch.einsum("besd,edh->besh", slots, self.up)), self.down)
        return torch.einsum("btes,besd->btd", combine, made)


class LongConvolution(nn.Module):
    """Hyena's operator: gates around a convolution as long as the text, by FFT, with a filter made from positions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.short = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=2, groups=3 * WIDTH)
        self.filter = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        first, second, value = self.short(self.enter(x).transpose(1, 2))[..., :length].chunk(3, 1)
        kernel = self.filter(torch.linspace(0, 1, length)[:, None]).T * torch.exp(-torch.linspace(0, 4, length))
        spectrum = torch.fft.rfft(value * first, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        return self.leave((torch.fft.irfft(spectrum, n=2 * length)[..., :length] * second).transpose(1, 2))


class WaveNet(nn.Module):
    """Causal dilated convolutions with gates, and skips that are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dilations = nn.Embedding(VOCAB, 16), (1, 2, 4, 8)
        self.gated = nn.ModuleList([nn.Conv1d(16, 32, 2, dilation=dilation) for dilation in self.dilations])
        self.residual, self.skip = (nn.ModuleList([nn.Conv1d(16, 16, 1) for _ in self.dilations]) for _ in range(2))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(16, 16, 1), nn.ReLU(), nn.Conv1d(16, VOCAB, 1))

    def forward(self, samples: Tensor) -> Tensor:
        x, skips = self.embed(samples).transpose(1, 2), 0
        for dilation, gated, residual, skip in zip(self.dilations, self.gated, self.residual, self.skip, strict=True):
            value, gate = gated(F.pad(x, (dilation, 0))).chunk(2, 1)
            made = torch.tanh(value) * torch.sigmoid(gate)
            skips = skips + skip(made)
            x = x + residual(made)
        return self.head(skips)


class TemporalConvolutions(nn.Module):
    """TCN: weight norm of today, chomped padding, a class by the last step."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        levels = [nn.Conv1d(16 if level else 8, 16, 3, padding=2 * 2**level, dilation=2**level) for level in range(3)]
        self.convs = nn.ModuleList([norm(level) for level in levels])
        self.down, self.head = nn.Conv1d(8, 16, 1), nn.Linear(16, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        x = series
        for level, conv in enumerate(self.convs):
            made = F.relu(conv(x)[:, :, : -2 * 2**level].contiguous())
            x = F.relu(made + (self.down(x) if level == 0 else x))
        return self.head(x[:, :, -1])


class AttentiveTranslator(nn.Module):
    """A bidirectional GRU reads; an LSTM cell with additive attention writes, taught by the target."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, 16), nn.Embedding(VOCAB, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.cell = nn.LSTMCell(16 + 32, 32)
        self.query, self.key, self.score = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 1)
        self.head = nn.Linear(64, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(source))
        hidden = torch.cat([last[0], last[1]], -1)
        cell, keys, scores = torch.zeros_like(hidden), self.key(memory), []
        for step in range(target.size(1)):
            weights = self.score(torch.tanh(keys + self.query(hidden).unsqueeze(1))).squeeze(-1).softmax(-1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            hidden, cell = self.cell(torch.cat([self.target(target[:, step]), context], -1), (hidden, cell))
            scores.append(self.head(torch.cat([hidden, context], -1)))
        return torch.stack(scores, 1).flatten(0, 1)


class SpeechToText(nn.Module):
    """DeepSpeech: convolutions over a spectrogram made from the wave, a bidirectional LSTM, scores for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, (2, 1), 1), nn.BatchNorm2d(8), nn.Hardtanh(0, 20))
        self.rnn, self.head = nn.LSTM(8 * 9, 16, batch_first=True, bidirectional=True), nn.Linear(32, CLASSES)

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = torch.stft(wave, 32, 16, window=self.window, return_complex=True).abs().clamp(min=1e-5).log()
        features = self.conv(spectrum.unsqueeze(1)).flatten(1, 2).transpose(1, 2)
        return self.head(self.rnn(features)[0]).log_softmax(-1).transpose(0, 1)


def connectionist(scores: Tensor, targets: Tensor) -> Tensor:
    """CTC of full-length recordings."""
    lengths = torch.full((scores.shape[1],), scores.shape[0], dtype=torch.long)
    return F.ctc_loss(scores, targets, lengths, torch.full((scores.shape[1],), targets.shape[1], dtype=torch.long))


class Conformer(nn.Module):
    """Two blocks: half feed-forwards, attention, convolution with GLU and batch norm."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feeds = nn.ModuleList(
                [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(2)]
            )
            self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.conv = nn.Sequential(
                nn.Conv1d(WIDTH, 64, 1), nn.GLU(dim=1), nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH),
                nn.BatchNorm1d(WIDTH), nn.SiLU(), nn.Conv1d(WIDTH, WIDTH, 1),
            )  # fmt: skip
            self.conv_norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.feeds[0](x) / 2
            normed = self.norm(x)
            x = x + self.attention(normed, normed, normed, need_weights=False)[0]
            x = x + self.conv(self.conv_norm(x).transpose(1, 2)).transpose(1, 2)
            return self.last(x + self.feeds[1](x) / 2)

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, WIDTH)
        self.blocks, self.head = nn.Sequential(self.Block(), self.Block()), nn.Linear(WIDTH, CLASSES)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.blocks(self.enter(frames))).log_softmax(-1).transpose(0, 1)


class BasisExpansion(nn.Module):
    """N-BEATS: each block explains a part of the past and adds to the forecast; a trend and a seasonal basis."""

    def __init__(self, past: int = 16, future: int = 8) -> None:
        super().__init__()
        self.past = past
        time = torch.linspace(-1, 1, past + future)
        trend = torch.stack([time**power for power in range(4)])
        season = torch.cat([fun(2 * math.pi * time * wave) for wave in (1, 2) for fun in (torch.cos, torch.sin)]).view(4, -1)
        self.register_buffer("bases", torch.stack([trend, season]))
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(past, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(4)]
        )

    def forward(self, series: Tensor) -> Tensor:
        forecast = 0
        for number, block in enumerate(self.blocks):
            explained = block(series) @ self.bases[number // 2]
            series = series - explained[:, : self.past]
            forecast = forecast + explained[:, self.past :]
        return forecast


class FusionForecast(nn.Module):
    """A temporal fusion transformer: variables chosen by gated residual networks, an LSTM, attention, three quantiles."""

    class Gated(nn.Module):
        def __init__(self, into: int, out: int) -> None:
            super().__init__()
            self.skip = nn.Linear(into, out) if into != out else nn.Identity()
            self.first, self.second, self.gate = nn.Linear(into, 16), nn.Linear(16, 16), nn.Linear(16, 2 * out)
            self.norm = nn.LayerNorm(out)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.skip(x) + F.glu(self.gate(self.second(F.elu(self.first(x)))), dim=-1))

    def __init__(self, variables: int = 4) -> None:
        super().__init__()
        self.embeds = nn.ModuleList([nn.Linear(1, 16) for _ in range(variables)])
        self.each, self.weights = nn.ModuleList([self.Gated(16, 16) for _ in range(variables)]), self.Gated(16 * variables, variables)
        self.rnn, self.attention = nn.LSTM(16, 16, batch_first=True), nn.MultiheadAttention(16, 2, batch_first=True)
        self.after, self.head = self.Gated(16, 16), nn.Linear(16, 3)

    def forward(self, series: Tensor) -> Tensor:
        values = [embed(series[..., number : number + 1]) for number, embed in enumerate(self.embeds)]
        chosen = self.weights(torch.cat(values, -1)).softmax(-1).unsqueeze(-2)
        mixed = (torch.stack([gate(value) for gate, value in zip(self.each, values, strict=True)], -1) * chosen).sum(-1)
        hidden, _ = self.rnn(mixed)
        mask = torch.triu(torch.ones(series.size(1), series.size(1), dtype=torch.bool), 1)
        attended, _ = self.attention(hidden, hidden, hidden, attn_mask=mask)
        return self.head(self.after(attended + hidden)[:, -4:])


def pinball(forecast: Tensor, truth: Tensor) -> Tensor:
    """The loss of three quantiles."""
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    error = truth.unsqueeze(-1) - forecast
    return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()


class NextItem(nn.Module):
    """GRU4Rec: sessions by a GRU, scored against the embeddings of all items; its loss ranks within the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.rnn = nn.Embedding(VOCAB, 16, padding_idx=0), nn.GRU(16, 16, 1, batch_first=True)

    def forward(self, session: Tensor) -> Tensor:
        return self.rnn(self.items(session))[0][:, -1] @ self.items.weight.T


def ranked(scores: Tensor, items: Tensor) -> Tensor:
    """Bayesian personalised ranking against the other rows' items."""
    sampled = scores[:, items]
    return -F.logsigmoid(sampled.diagonal().unsqueeze(1) - sampled).mean()


class SelfAttentiveItems(nn.Module):
    """SASRec: causal attention over items, scores of what came next and of one that did not."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(VOCAB, 32, padding_idx=0), nn.Embedding(SEQ, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)

    def forward(self, seen: Tensor, next_items: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        length = seen.size(1)
        mask = torch.ones(length, length, dtype=torch.bool).tril().logical_not()
        x = (self.items(seen) * 32**0.5 + self.places.weight[:length]) * (seen != 0).unsqueeze(-1)
        hidden = self.encoder(x, mask=mask)
        return (hidden * self.items(next_items)).sum(-1), (hidden * self.items(others)).sum(-1)


def told_apart(scores: tuple[Tensor, Tensor]) -> Tensor:
    """Binary cross-entropy of the true and the drawn items."""
    right, wrong = scores
    judge = F.binary_cross_entropy_with_logits
    return judge(right, torch.ones_like(right)) + judge(wrong, torch.zeros_like(wrong))


def _language(name: str, block: type[nn.Module], positions: bool = False) -> Family:
    return classified(name, lambda: Language(block, positions), lambda: (token_ids(),), lambda: token_ids(BATCH * SEQ))


def _letters() -> Tensor:
    return torch.randint(1, CLASSES, (BATCH, 4))


SEQUENCES: tuple[Family, ...] = (
    _language("selective scan", SelectiveScan),
    _language("time mix", TimeMix),
    _language("linear attention", LinearAttention),
    _language("performer", RandomFeatures, positions=True),
    _language("longformer windows", Windows, positions=True),
    _language("reformer chunks", HashedChunks, positions=True),
    _language("grouped alibi", GroupedAlibi),
    _language("retention", Retention),
    _language("soft mixture", SoftMixture),
    _language("hyena", LongConvolution),
    classified("wavenet", WaveNet, lambda: (token_ids(),), token_ids),
    classified("tcn", TemporalConvolutions, lambda: (torch.randn(BATCH, 8, SEQ),), lambda: torch.randint(CLASSES, (BATCH,))),
    classified("seq2seq attention", AttentiveTranslator, lambda: (token_ids(BATCH, 8), token_ids(BATCH, 6)), lambda: token_ids(BATCH * 6)),
    trained_by(connectionist, "deepspeech", SpeechToText, lambda: (torch.randn(BATCH, 256),), _letters),
    trained_by(connectionist, "conformer", Conformer, lambda: (torch.randn(BATCH, 16, 16),), _letters),
    trained_by(F.l1_loss, "n-beats", BasisExpansion, lambda: (torch.randn(BATCH, 16),), lambda: torch.randn(BATCH, 8)),
    trained_by(pinball, "temporal fusion", FusionForecast, lambda: (torch.randn(BATCH, 12, 4),), lambda: torch.randn(BATCH, 4)),
    trained_by(ranked, "gru4rec", NextItem, lambda: (token_ids(8, 6),), lambda: token_ids(8)),
    trained_by(told_apart, "sasrec", SelfAttentiveItems, lambda: tuple(token_ids() for _ in range(3)), None),
)  # fmt: skip
