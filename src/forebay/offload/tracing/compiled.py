"""Makes compiled parts of a model visible to a dispatch mode: each is one operator.

Theory. `torch.compile` makes many operators into one piece of code, a *region*, which reads its tensors by address and
passes no dispatch mode. An active mode keeps torch from compiling at all, unless it says that it ignores the inside,
and what torch skipped once is not compiled later. So the mode of `dispatch` says so. With `show_regions`, Inductor
hands each region to the mode whole, with its tensors. For traces and for moving tensors it is then an operator that
uses its inputs and makes its outputs. Other backends run the operators of their graph one by one.

A region allocates what it needs inside. An accelerator's allocator sees that; in host memory nobody does. Torch counts
what it writes among its inputs in their versions afterwards. A region has no points, since torch would cut it in two at
each. Its saved tensors come back all at once, so a model that is one region gains nothing.

Regions compiled before `show_regions` reach no mode. Mostly they are compiled once more, since torch compiles for the
modes that it finds, and the guard is one. If not, their inputs are here all the same: a compiled module's parameters
and buffers are loaded before its forward pass, and autograd asks for what backward uses.

Rejected: running everything eagerly while steps are watched (other bits than the compiled code's, and a plan for
tensors that it never saves).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.config
from torch._higher_order_ops.wrap import inductor_compiled_code
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACE = "compiled"


class _Region:
    """Any region, with the attributes that operators have: `REGION(code, inputs)` runs it."""

    namespace = NAMESPACE
    is_view = False
    tags = frozenset({torch.Tag.data_dependent_output})  # it did something, whatever comes out
    _overloadpacket = None
    _schema = SimpleNamespace(
        name=f"{NAMESPACE}::region",
        arguments=[SimpleNamespace(name=name, alias_info=None) for name in ("code", "inputs")],
    )

    def __call__(self, code: Any, inputs: Any, **told: Any) -> Any:
        return inductor_compiled_code(code, list(inputs), **told)  # it empties the list

    def on_meta(self, code: Any, inputs: Any) -> Any:
        """Outputs without bytes, for inputs without bytes. `NotImplementedError` if the code came without its graph."""
        graph = getattr(code, "original_gm", None)
        if graph is None:
            raise NotImplementedError("what this region makes is seen when it runs")
        return graph(*inputs)


REGION = _Region()


def hand_regions_to(mode: type[TorchDispatchMode]) -> None:
    """From now on a mode of that class is given regions, as `REGION` with its arguments."""

    @inductor_compiled_code.py_impl(mode)  # type: ignore[untyped-decorator]  # torch is not followed
    def handed(mode: Any, code: Any, inputs: Any, **told: Any) -> Any:
        return mode.__torch_dispatch__(REGION, (), (code, tuple(inputs)), told)


def show_regions() -> None:
    """What inductor compiles from now on in this process it hands to modes. It costs a call of Python for each."""
    torch._inductor.config.wrap_inductor_compiled_regions = True


def is_compiled(module: Any) -> bool:
    """Whether the forward of a module is compiled, by `module.compile()` or by `torch.compile(module)`."""
    return module._compiled_call_impl is not None or type(module).__module__.startswith("torch._dynamo")


def _nothing(*_: Any) -> None:
    """What a hook of ours is in a copy of the model, and what is done where there is nothing to do."""


def _no_hook() -> Callable[..., None]:
    return _nothing


class Hook:
    """A hook at a model or optimizer, which may be copied or saved: the copy is not ours, and its hook does nothing."""

    def __init__(self, work: Callable[..., None]) -> None:
        self._work = work

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # what a compiled module calls would be compiled as well
    def __call__(self, *args: Any) -> None:
        self._work(*args)

    def __reduce__(self) -> Any:
        return _no_hook, ()


class _Called:
    """A compiled module's forward, with what is done before and after it."""

    def __init__(self, module: Any) -> None:
        self.module, self.forward = module, module._compiled_call_impl
        self.around: list[tuple[Callable[..., None], Callable[..., None]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for before, _ in list(self.around):
            before(self.module, args)
        output = self.forward(*args, **kwargs)
        for _, after in list(self.around):
            after(self.module, args, output)
        return output


class Around:
    """Calls `before(module, args)` and `after(module, args, output)` at each forward of a compiled module, until it is
    removed; who came last is called first. Hooks will not do: `module.compile()` has them within what is compiled, and
    torch compiles other parts of a module that has some."""

    def __init__(self, module: Any, before: Callable[..., None], after: Callable[..., None] = _nothing) -> None:
        self._module, self._entry = module, (before, after)
        self._hooks: list[Any] = []
        if module._compiled_call_impl is None:  # a wrapper around the module, and its hooks are outside
            self._hooks = [
                module.register_forward_pre_hook(Hook(before), prepend=True),
                module.register_forward_hook(Hook(after)),
            ]
            return
        if not isinstance(module._compiled_call_impl, _Called):
            module._compiled_call_impl = _Called(module)
        module._compiled_call_impl.around.insert(0, self._entry)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        called = self._module._compiled_call_impl
        if isinstance(called, _Called) and self._entry in called.around:
            called.around.remove(self._entry)
            if not called.around:
                self._module._compiled_call_impl = called.forward


def compiled_modules(model: Any) -> list[Any]:
    """The modules that are compiled, without those inside of others."""
    inner = inside_compiled(model)
    return [module for module in model.modules() if is_compiled(module) and id(module) not in inner]


def inside_compiled(model: Any) -> set[int]:
    """By `id`, the modules that are inside of a compiled one."""
    return {
        id(inner)
        for module in model.modules()
        if is_compiled(module)
        for inner in module.modules()
        if inner is not module
    }
