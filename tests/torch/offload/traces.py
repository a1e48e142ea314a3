"""Traces for tests: a small network in layers, and random ones."""

import random

from forebay.offload.planning.hardware import RESERVE_SHARE
from forebay.offload.planning.stretches import stretches_of
from forebay.offload.planning.trace import TensorSaid, Trace, build

MIB = 1 << 20


def budget_of(trace: Trace, share: float) -> int:
    """That share of what the step needs, or the least that a plan can do with, if that is more."""
    least = int(stretches_of(trace, 1).required_bytes.max() / (1 - RESERVE_SHARE)) + 2
    return max(int(trace.need_bytes().max() * share), least)


def layered(
    layers: int = 8, weight_bytes: int = 64 * MIB, activation_bytes: int = 48 * MIB, layer_s: float = 0.01
) -> Trace:
    """A training step with Adam: forward, backward (twice the time), then a step for each layer."""
    operators: list[tuple[str, float, int]] = []
    points: list[tuple[str, int]] = [("step", 0)]
    tensors: list[TensorSaid] = []
    forward = range(layers)
    backward = [2 * layers - 1 - layer for layer in forward]
    update = [2 * layers + layer for layer in forward]
    for layer in forward:
        operators.append((f"forward {layer}", layer_s, MIB))
    for layer in reversed(forward):
        operators.append((f"backward {layer}", 2 * layer_s, MIB))
    for layer in forward:
        operators.append((f"update {layer}", layer_s / 4, 0))
    points += [(name, at) for at, (name, _, _) in enumerate(operators)]
    for layer in forward:
        tensors.append(
            TensorSaid(
                f"weight {layer}",
                "parameter",
                weight_bytes,
                [layer, backward[layer], update[layer]],
                [update[layer]],
                persistent=True,
            )
        )
        for name in ("mean", "variance"):
            tensors.append(
                TensorSaid(
                    f"{name} {layer}",
                    "optimizer state",
                    weight_bytes,
                    [update[layer]],
                    [update[layer]],
                    persistent=True,
                )
            )
        gradient = [backward[layer], update[layer]]
        tensors.append(TensorSaid(f"gradient {layer}", "gradient", weight_bytes, gradient, [backward[layer]]))
        kept = [layer, backward[layer]]
        tensors.append(TensorSaid(f"activation {layer}", "activation", activation_bytes, kept, [layer]))
    return build("layered", operators, points, tensors)


def randomly(seed: int, operators: int = 24, tensors: int = 12) -> Trace:
    """Any trace: sizes, lives, uses and writes at random, points at some operators only."""
    chance = random.Random(seed)
    rows = [(f"op {at}", chance.choice((0.0, 0.001, 0.01, 0.05)), chance.randrange(4) * MIB) for at in range(operators)]
    points = [("step", 0)] + [(f"point {at}", at) for at in range(1, operators + 1) if chance.random() < 0.6]
    said = []
    for number in range(tensors):
        persistent = chance.random() < 0.4
        uses = sorted(chance.sample(range(operators), chance.randrange(1, 6)))
        writes = [at for at in uses if chance.random() < 0.4]
        if not persistent and uses[0] not in writes:
            writes = [uses[0], *writes]
        kind = (
            chance.choice(("parameter", "optimizer state")) if persistent else chance.choice(("activation", "gradient"))
        )
        said.append(TensorSaid(f"tensor {number}", kind, chance.randrange(1, 64) * MIB, uses, writes, persistent))
    return build(f"random {seed}", rows, points, said)
