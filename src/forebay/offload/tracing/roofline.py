"""Estimates how long an operator takes on an accelerator that is not here, from a table of speeds.

Theory. An operator takes as long as its arithmetic or its bytes, whichever is longer, and at least the launch of a
kernel. The arithmetic is torch's own count (matrix products, convolutions, attention; everything else is its bytes).
Bytes are those of arguments and outputs, twice for what is both read and written; lookups read as much as they return.

The estimate leaves out caches, shapes that fill the machine badly, several kernels in one operator (foreach), and
queues. It shows which operators are long and by how much, within some tens of per cent for big matrix products. A
profile is more reliable. Causal attention counts as half, as its kernels do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from forebay.core.errors import Invalid
from forebay.offload.tracing.storages import tensors

_ATEN = torch.ops.aten
# What the processor calls its fused attention; the arithmetic, and the order of arguments that matter, are the same.
_SAME_FLOPS = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
_ATTENTION = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_cudnn_attention,
        _ATEN._scaled_dot_product_flash_attention_backward,
        _ATEN._scaled_dot_product_efficient_attention_backward,
        _ATEN._scaled_dot_product_cudnn_attention_backward,
        *_SAME_FLOPS,
    }
)
_LOOKUPS = frozenset({_ATEN.embedding, _ATEN.index_select, _ATEN.gather, _ATEN.index})


@dataclass(frozen=True)
class Roofline:
    """Speeds that an accelerator reaches: operations a second by number type (others: as float32), bytes a second of
    its memory and of its link to the host in each direction, and the shortest time of an operator."""

    name: str
    flops_s: Mapping[str, float] = field(hash=False)
    memory_bytes_s: float
    link_bytes_s: float
    op_overhead_s: float = 5e-6

    def __post_init__(self) -> None:
        if "float32" not in self.flops_s or min(*self.flops_s.values(), self.memory_bytes_s, self.link_bytes_s) <= 0:
            raise Invalid("a table of speeds needs float32, and nothing in it may be 0 or less: check its numbers")

    def seconds(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
        """How long an operator takes; for `Profiler(seconds_of=)`."""
        moved_s = moved_bytes(operator, args, kwargs, output) / self.memory_bytes_s
        return max(self.op_overhead_s, moved_s, self._arithmetic_s(operator, args, kwargs, output))

    def _arithmetic_s(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
        packet = operator._overloadpacket
        formula = flop_registry.get(_SAME_FLOPS.get(packet, packet))
        if formula is None:
            return 0.0
        number_type = next((str(one.dtype).removeprefix("torch.") for one in tensors(output)), "float32")
        if packet in _ATTENTION:
            args = _with_all_heads(args)
        flops = float(formula(*args, **kwargs, out_val=output))
        if _is_causal(operator, args, kwargs):
            flops /= 2
        return flops / self.flops_s.get(number_type, self.flops_s["float32"])


# NVIDIA's data sheet of the H100 SXM: 989.4 TFLOP/s dense for 16 bit, 494.7 for TF32, 3.35 TB/s; the link is PCIe 5 x16
# (64 GB/s). Times what large products (0.65) and copies (0.85) usually reach of these. A table, not a measurement.
# float32 is with TF32 (`torch.set_float32_matmul_precision("high")`): without it, 66.9 TFLOP/s is the peak.
H100 = Roofline(
    "H100 SXM, a table",
    {"bfloat16": 0.65 * 989.4e12, "float16": 0.65 * 989.4e12, "float32": 0.65 * 494.7e12},
    memory_bytes_s=0.85 * 3.35e12,
    link_bytes_s=0.8 * 64e9,
)


def moved_bytes(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Bytes of memory that an operator reads and writes."""
    schema = operator._schema.arguments
    outputs = sum(_size_bytes(one) for one in tensors(output))
    if operator._overloadpacket in _LOOKUPS:
        return 2 * outputs
    read = written = 0
    for at, argument in enumerate(schema):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        size_bytes = sum(_size_bytes(one) for one in tensors(value))
        read += size_bytes
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
            written += size_bytes  # fused optimizers may write gradients, but do so only for a scaler of them
    return read + (written or outputs)


def _size_bytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _with_all_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an attention with as many heads of keys and values as of queries: torch 2.11 and 2.12 count no
    other, and the arithmetic is the same."""
    tensors_of_four = [value for value in args if isinstance(value, torch.Tensor) and value.dim() == 4]
    heads = max((value.shape[1] for value in tensors_of_four), default=0)

    def whole(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.shape[1] == heads:
            return value
        return torch.empty(value.shape[0], heads, *value.shape[2:], dtype=value.dtype, device="meta")

    return tuple(whole(value) for value in args)


def _is_causal(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for at, argument in enumerate(operator._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[at] if at < len(args) else kwargs.get("is_causal", False))
    return False
