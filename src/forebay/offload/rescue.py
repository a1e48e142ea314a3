"""Runs the operators of planned steps again that an accelerator had no memory for.

Theory. A plan counts tensors, and an allocator has gaps that nobody counts. Without a plan every operator passes a
dispatch mode anyway, and is run again when something has left (`demand`). Under a plan a mode costs some microseconds
at every operator: a quarter of a step of small kernels on an H200. So it is on for the first STEPS of each plan, in
which an allocator finds its blocks, then until in STEPS in a row nothing was run again and the allocator was not short
(it gave back what it kept, and found room then), and for good once a step without it had no memory. That step fails,
and says what to do.

An operator that writes one of its inputs is not run again: perhaps it did so already.

Invariant. Nothing leaves that the operator uses, or the stretch of the plan that it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from forebay.offload.movables import Books, Movable
from forebay.offload.tracing.dispatch import OperatorMode, with_memory
from forebay.offload.tracing.storages import writes_an_input

STEPS = 16
RETRY = (
    "the plan kept to its budget, and the allocator had no room all the same. Weights and optimizer state are as "
    "before the step: drop its gradients (optimizer.zero_grad()) and take it again. From now on more leaves where that "
    "happens. If it comes again, give a smaller budget"
)


class Rescue:
    """Of one engine. `used(values)` gives the movables of tensors; `shortages()` counts those of the allocator."""

    def __init__(
        self, books: Books, used: Callable[[Iterable[Any]], Iterable[Movable]], shortages: Callable[[], int]
    ) -> None:
        self.rescued = 0  # operators that were run again
        self._books, self._used, self._shortages = books, used, shortages
        self._short = 0
        self._mode = OperatorMode(self._dispatch)
        self._is_on = self._for_good = False
        self._left = 0

    def renew(self) -> None:
        """There is another plan."""
        self._left = STEPS

    def put(self) -> bool:
        """A step begins; whether its operators are watched."""
        before, self._short = self._short, self._shortages()
        if self._short > before:
            self._left = STEPS  # the next time it may find none
        self._is_on = self._for_good or self._left > 0
        self._left -= self._left > 0
        if self._is_on:
            self._mode.put()
        return self._is_on

    def take_off(self) -> None:
        """It is over, or goes without the plan."""
        if self._is_on:
            self._is_on = False
            self._mode.take_off()

    def failed(self, error: BaseException, *, updating: bool) -> None:
        """A step had no memory; what to do is added to its error."""
        self._for_good = True
        if not updating:
            error.add_note(RETRY)

    def _dispatch(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_memory(lambda: operator(*args, **kwargs), lambda: self._relieve(operator, args, kwargs))

    def _relieve(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        relieve = self._books.relieve
        if relieve is None or writes_an_input(operator):
            return False
        together = self._books.together
        with self._books:
            self._books.together = [*together, *self._used(args), *self._used(kwargs.values())]
            try:
                relieved = relieve()
            finally:
                self._books.together = together
        if relieved:
            self.rescued += 1
            self._left = STEPS  # the allocator is short in these steps: it will be again
        return relieved
