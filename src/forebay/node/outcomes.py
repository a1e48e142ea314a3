"""How the engine is asked, and how an outcome (an answer, or the `ForebayError` in its place) reaches who awaits it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from forebay.core.errors import ForebayError

AnswerT = TypeVar("AnswerT")
Call = Callable[
    [str, Any], Coroutine[Any, Any, Any]
]  # (verb, arguments) -> answer, as core/messages/calls.py types them
from_node: ContextVar[bool] = ContextVar("from_node", default=False)  # another node of the cluster asks
for_client: ContextVar[bool] = ContextVar("for_client", default=False)  # and relays the answer


def resolve(future: asyncio.Future[AnswerT], outcome: AnswerT | ForebayError) -> None:
    """The future's result, or its exception; nothing where who asked is gone."""
    if future.done():
        return
    if isinstance(outcome, ForebayError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
