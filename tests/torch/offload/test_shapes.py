"""Traces of models that nobody runs here: they are what a real run gives, and plans can be made from them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter

from forebay.core.errors import Invalid
from forebay.offload.planning.choose import choose
from forebay.offload.planning.hardware import Hardware
from forebay.offload.planning.trace import KINDS
from forebay.offload.tracing.profile import Profiler
from forebay.offload.tracing.roofline import H100, Roofline, moved_bytes
from forebay.offload.tracing.shapes import SHAPES, Decoder, Shape, fake_trace, trace_of, word_loss
from tests.torch.offload import networks

SLOW = Roofline("slow", {"float32": 1e9}, memory_bytes_s=1e9, link_bytes_s=1e9, op_overhead_s=1e-9)
PLAIN = Shape(64, 2, 32, 4, 4, 64, gated=False, biased=True, tied=True, positions=16)


# --- fake and real ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [networks.SMALL, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_a_fake_step_is_the_real_one(shape: Shape, settings: dict[str, Any]) -> None:
    def make_optimizer(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), **settings)

    fake = fake_trace(
        lambda: Decoder(shape, 16), networks.words, make_optimizer, word_loss, table=H100, chunk_bytes=1 << 14
    )
    model, batch = networks.decoder(shape), networks.words()
    optimizer = make_optimizer(model)
    networks.step(model, optimizer, batch, word_loss)
    with Profiler(model, optimizer, chunk_bytes=1 << 14) as profiler:
        networks.step(model, optimizer, batch, word_loss)
    real = profiler.trace()
    assert fake.operators == real.operators
    assert fake.point_names == real.point_names
    assert fake.tensors == real.tensors
    columns = ("points", "kinds", "sizes_bytes", "persistent", "births", "deaths", "use_ends", "use_operators")
    for column in (*columns, "use_writes", "workspace_bytes"):
        assert np.array_equal(getattr(fake, column), getattr(real, column)), column
    assert fake.about["seconds"] == "from a table"
    assert fake.about["table"] == H100.name


def test_a_torch_that_counts_attention_of_equal_heads_only_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before 2.13 refuse fewer heads of keys than of queries."""
    count = flop_counter.sdpa_flop_count

    def strict(query: Any, key: Any, value: Any) -> int:
        assert query[1] == key[1] == value[1]
        return int(count(query, key, value))

    def traced() -> list[float]:
        return list(
            fake_trace(
                lambda: Decoder(networks.SMALL, 16),
                networks.words,
                lambda model: torch.optim.AdamW(model.parameters()),
                word_loss,
                table=SLOW,
            ).times_s
        )

    expected = traced()
    monkeypatch.setattr(flop_counter, "sdpa_flop_count", strict)
    assert traced() == expected


# --- shapes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2-xl", 1.5576e9), ("llama-3-8b", 8.0303e9), ("granite-8b-code", 8.0548e9), ("llama-3-70b", 70.5537e9)],
)
def test_shapes_have_as_many_parameters_as_published(name: str, parameters: float) -> None:
    def count(layers: int) -> int:
        with FakeTensorMode():
            model = Decoder(replace(SHAPES[name], layers=layers), 16)
            return sum(parameter.numel() for parameter in model.parameters())

    one, two = count(1), count(2)
    assert one + (SHAPES[name].layers - 1) * (two - one) == pytest.approx(parameters, rel=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_traced_with_few_layers(name: str) -> None:
    trace = trace_of(name, batch=2, sequence=128, layers=2)
    assert trace.name == f"{name}, 2 layers, 2 x 128"
    shape = SHAPES[name]
    weight = trace.tensors.index("parameter layers.1.attention.query.weight")
    assert trace.sizes_bytes[weight] == 4 * shape.width**2
    parameters = trace.sizes_bytes[trace.kinds == KINDS.index("parameter")].sum()
    state = trace.sizes_bytes[trace.kinds == KINDS.index("optimizer state")].sum()
    assert state == pytest.approx(2 * parameters, rel=1e-3)
    assert trace.need_bytes().max() > 4 * parameters * 0.99
    assert ("parameter scores.weight" in trace.tensors) is not shape.tied


def test_a_step_takes_longer_for_more_words() -> None:
    short, long = (trace_of("llama-3-8b", sequence=length, layers=1) for length in (128, 1024))
    assert len(short.operators) == len(long.operators)
    assert (long.times_s >= short.times_s).all()
    assert long.compute_s > short.compute_s


def test_plans_are_made_from_a_shape() -> None:
    trace = trace_of("llama-3-8b", batch=8, sequence=1024, layers=2)
    budget = int(max(trace.need_bytes().max() * 0.8, trace.active_bytes().max() * 1.05))
    assert budget < trace.need_bytes().max()
    machine = Hardware(
        budget, host_bytes=1 << 40, link_out_bytes_s=H100.link_bytes_s, link_in_bytes_s=H100.link_bytes_s
    )
    choice, _ = choose(trace, machine, ("area",))
    assert choice.plan.moves
    moved = {KINDS[trace.kinds[move.tensor]] for move in choice.plan.moves}
    assert moved & {"parameter", "optimizer state", "gradient", "activation"}
    assert choice.replayed.step_s >= trace.compute_s


def test_shapes_that_are_not_there_are_refused() -> None:
    with pytest.raises(Invalid, match="no shape is called 'llama-9'"):
        trace_of("llama-9")
    with pytest.raises(Invalid, match="positions for 1024 words"):
        trace_of("gpt2-xl", sequence=2048)
    with pytest.raises(Invalid, match="heads must divide the width"):
        Shape(64, 2, 32, 5, 5, 64)


# --- times -----------------------------------------------------------------------------------------------------------
def seconds(table: Roofline, operator: Any, *args: Any) -> float:
    return table.seconds(operator, args, {}, operator(*args))


def test_products_take_their_arithmetic_and_sums_their_bytes() -> None:
    aten = torch.ops.aten
    square = torch.ones(100, 100)
    assert seconds(SLOW, aten.mm.default, square, square) == pytest.approx(2e6 / 1e9)
    assert seconds(SLOW, aten.add.Tensor, square, square) == pytest.approx(3 * 40_000 / 1e9)
    assert seconds(SLOW, aten.add_.Tensor, square, square) == pytest.approx(3 * 40_000 / 1e9)
    assert seconds(H100, aten.add.Tensor, square, square) == H100.op_overhead_s


def test_lookups_read_no_more_than_they_give() -> None:
    table, rows = torch.ones(1000, 10), torch.zeros(3, dtype=torch.int64)
    embedding = torch.ops.aten.embedding.default
    assert moved_bytes(embedding, (table, rows), {}, embedding(table, rows)) == 2 * 3 * 10 * 4


def test_causal_attention_is_half_of_the_other() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    query = torch.ones(1, 2, 64, 16)
    whole = seconds(SLOW, attention, query, query, query, 0.0, False)
    assert whole == pytest.approx(2 * 2 * 2 * 64 * 64 * 16 / 1e9)
    assert seconds(SLOW, attention, query, query, query, 0.0, True) == pytest.approx(whole / 2)


def test_a_table_without_numbers_is_refused() -> None:
    with pytest.raises(Invalid, match="needs float32"):
        Roofline("none", {"bfloat16": 1.0}, 1.0, 1.0)
    with pytest.raises(Invalid, match="0 or less"):
        Roofline("none", {"float32": 1.0}, 0.0, 1.0)
