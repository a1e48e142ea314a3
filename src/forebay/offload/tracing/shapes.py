"""Traces steps of models that fit no machine at hand: decoders of published sizes, with tensors that have no memory.

Theory. A fake tensor has a shape, a type and a storage without memory. Autograd, hooks and optimizers work on it as on
any other. So a laptop can profile a whole training step of a model of any size in seconds: the same profiler sees the
same operators, storages and points. Only the times come from a table (`roofline`), and are marked so.

The decoders are the usual ones: attention with fewer key heads than query heads, rotary or learned positions, a gated
or a plain feed-forward. Their dimensions decide a trace. Queries, keys and values are three projections in each. The
fake device is the processor's, since a torch without CUDA cannot run autograd on fake CUDA tensors; its fused attention
saves what the GPU's saves. The optimizer uses its fused form, one operator for each chunk, as on a GPU.

Rejected: shapes from a hub of models (a network, and a large dependency, for a dozen numbers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from forebay.core.errors import Invalid
from forebay.offload.planning.trace import Trace
from forebay.offload.tracing.chunks import CHUNK_BYTES
from forebay.offload.tracing.points import Wanted
from forebay.offload.tracing.profile import Profiler
from forebay.offload.tracing.roofline import H100, Roofline

Tensor = Any


@dataclass(frozen=True)
class Shape:
    """The dimensions of a decoder. `hidden` is the feed-forward's width; `positions` 0 means rotary ones."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    gated: bool = True  # SiLU-gated with RMSNorm; else GELU with LayerNorm
    biased: bool = False
    tied: bool = False  # one matrix for words in and out
    positions: int = 0

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.key_heads or self.layers < 1:
            raise Invalid(
                "heads must divide the width, key heads the heads, and there must be a layer: check the shape"
            )


SHAPES = {
    # openai-community/gpt2-xl, config.json (Radford et al. 2019)
    "gpt2-xl": Shape(50257, 48, 1600, 25, 25, 6400, gated=False, biased=True, tied=True, positions=1024),
    # meta-llama/Meta-Llama-3-8B, config.json; The Llama 3 Herd of Models (arXiv 2407.21783), table 3
    "llama-3-8b": Shape(128256, 32, 4096, 32, 8, 14336),
    # ibm-granite/granite-8b-code-base, config.json; Granite Code Models (arXiv 2405.04324), table 1
    "granite-8b-code": Shape(49152, 36, 4096, 32, 8, 14336, biased=True, tied=True),
    # meta-llama/Meta-Llama-3-70B, config.json; arXiv 2407.21783, table 3
    "llama-3-70b": Shape(128256, 80, 8192, 64, 8, 28672),
}


class Attention(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """Causal attention of grouped heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.key_heads = shape.heads, shape.key_heads
        key_width = shape.width // shape.heads * shape.key_heads
        self.query = nn.Linear(shape.width, shape.width, bias=shape.biased)
        self.key = nn.Linear(shape.width, key_width, bias=shape.biased)
        self.value = nn.Linear(shape.width, key_width, bias=shape.biased)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.biased)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, length, width = x.shape
        query = self.query(x).view(batch, length, self.heads, -1)
        key = self.key(x).view(batch, length, self.key_heads, -1)
        value = self.value(x).view(batch, length, self.key_heads, -1)
        if turns is not None:
            query, key = _turned(query, *turns), _turned(key, *turns)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.heads != self.key_heads,
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """Gated (SwiGLU) or plain (GELU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=shape.biased) if shape.gated else None
        self.up = nn.Linear(shape.width, shape.hidden, bias=shape.biased)
        self.down = nn.Linear(shape.hidden, shape.width, bias=shape.biased)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(x), approximate="tanh"))
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """Attention and feed-forward, each behind a norm and beside its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(shape), Attention(shape)
        self.feed_forward_norm, self.feed_forward = _norm(shape), FeedForward(shape)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """A decoder-only language model: numbers of words in, scores of the next word out."""

    def __init__(self, shape: Shape, sequence: int) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.positions, shape.width) if shape.positions else None
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.scores = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.scores.weight = self.words.weight
        if self.places is None:
            angles = torch.outer(torch.arange(sequence), 1e4 ** -torch.linspace(0, 1, shape.width // shape.heads // 2))
            self.register_buffer("cosines", angles.cos()[:, None, :], persistent=False)
            self.register_buffer("sines", angles.sin()[:, None, :], persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        turns = None
        if self.places is None:
            turns = self.cosines, self.sines
        else:
            x = x + self.places(torch.arange(words.shape[1], device=words.device))
        for layer in self.layers:
            x = layer(x, turns)
        return self.scores(self.norm(x))


def _norm(shape: Shape) -> Any:
    return nn.RMSNorm(shape.width, eps=1e-5) if shape.gated else nn.LayerNorm(shape.width)


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)


def word_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of the next word, for a `Decoder` and a batch of words and the words that follow."""
    words, following = batch
    return functional.cross_entropy(model(words).flatten(0, 1), following.flatten())


def fake_trace(
    make_model: Callable[[], Any],
    make_batch: Callable[[], Any],
    make_optimizer: Callable[[Any], Any],
    loss_of: Callable[[Any, Any], Any],
    *,
    table: Roofline,
    name: str = "step",
    points_of: Wanted | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Trace:
    """One training step of a model that is made, and runs, without memory: forward, backward, optimizer, gradients
    set to None. The functions are called under `FakeTensorMode`, `make_optimizer` with the model. Times are `table`'s.
    """
    with FakeTensorMode():
        model = make_model()
        batch, optimizer = make_batch(), make_optimizer(model)
        _make_state(optimizer)
        profiler = Profiler(model, optimizer, points_of=points_of, chunk_bytes=chunk_bytes, seconds_of=table.seconds)
        with profiler:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return profiler.trace(name, {"table": table.name})


def _make_state(optimizer: Any) -> None:
    """The optimizer's state as after a first step, without the forward and backward of one."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def trace_of(
    shape: str | Shape,
    *,
    batch: int = 1,
    sequence: int = 2048,
    layers: int | None = None,
    table: Roofline = H100,
    chunk_bytes: int = CHUNK_BYTES,
) -> Trace:
    """A step of one of SHAPES (or another shape), float32 with AdamW, for `batch` sequences of `sequence` words.
    `layers` instead of as many as it has. `Invalid` for a name that is not there."""
    name = shape if isinstance(shape, str) else "decoder"
    found = SHAPES.get(shape) if isinstance(shape, str) else shape
    if found is None:
        raise Invalid(f"no shape is called {name!r}: use one of {', '.join(SHAPES)}, or give a Shape")
    if layers is not None:
        found = replace(found, layers=layers)
    if found.positions and sequence > found.positions:
        raise Invalid(f"{name} has positions for {found.positions} words, not for {sequence}: use a shorter sequence")
    words = (batch, sequence)
    return fake_trace(
        lambda: Decoder(found, sequence),
        lambda: (torch.zeros(words, dtype=torch.int64), torch.zeros(words, dtype=torch.int64)),
        lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        word_loss,
        table=table,
        name=f"{name}, {found.layers} layers, {batch} x {sequence}",
        chunk_bytes=chunk_bytes,
    )
