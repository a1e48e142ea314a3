"""An outcome is an answer or the `ForebayError` that stands in its place: how it reaches who awaits it."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from forebay.core.errors import ForebayError

AnswerT = TypeVar("AnswerT")


def resolve(future: asyncio.Future[AnswerT], outcome: AnswerT | ForebayError) -> None:
    """The future's result, or its exception; nothing where who asked is gone."""
    if future.done():
        return
    if isinstance(outcome, ForebayError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
