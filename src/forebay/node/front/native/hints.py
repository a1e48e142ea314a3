"""Hints over HTTP: a job's future comes in as msgpack, and goes to the engine as it is.

Theory. Whoever may read all that a listing lists may say what they will read of it. So a future needs `read` of
everything under the prefix that it names, and to move, look at or end a job one needs `read` of that job's. Each
identity has jobs of its own: the name of another's is no job.

Invariant. The job in the path is the job in the body.
"""

from __future__ import annotations

from typing import Any

import msgspec

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import Invalid, NotFound
from forebay.core.machines.hints import HintsAtCall, HintsCall, HintsNamed, HintsState
from forebay.core.versions import whose_versions
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.requests import Exchange, Request, decode_query
from forebay.node.front.native.arguments import JSON, encode
from forebay.node.outcomes import Call

BODY_BYTES_MAX = 4 * limits.MIB  # 349,000 accesses


class HintAnswers:
    """Answers `/-/v1/hints/JOB`."""

    def __init__(self, call: Call, auth: Auth) -> None:
        self._call, self._auth = call, auth

    def tell(self, request: Request, exchange: Exchange, job: str) -> None:
        """POST: a job's future. `Invalid` for a body that is none."""
        decode: Any = msgspec.json.decode
        if request.header(b"content-type").partition(";")[0].strip() == "application/msgpack":
            decode = msgspec.msgpack.decode
        try:
            told: HintsCall = decode(request.body, type=HintsCall)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Invalid(f"the body tells no future: {error}; see HintsCall in /-/openapi.json") from None
        if told.job != job:
            raise Invalid(f"the path names the job {job!r} and the body {told.job!r}: make them the same")
        identity = self._auth.bearer(request)
        self._auth.require(identity, "read", whose_versions(told.bucket) or told.bucket, told.prefix)
        exchange.spawn(self._answer(exchange, "hints", self._owned(told, identity)))

    def at(self, request: Request, exchange: Exchange, job: str) -> None:
        """PUT: how far it is."""
        text = decode_query(request.query).get("position", "")
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise Invalid("position is not a number: say how many accesses the job has consumed")
        exchange.spawn(self._of_job(exchange, self._auth.bearer(request), "hints_at", HintsAtCall(job, int(text))))

    def ask(self, request: Request, exchange: Exchange, verb: str, job: str) -> None:
        """GET and DELETE."""
        exchange.spawn(self._of_job(exchange, self._auth.bearer(request), verb, HintsNamed(job)))

    async def _of_job(self, exchange: Exchange, identity: Identity, verb: str, arguments: Any) -> None:
        arguments = self._owned(arguments, identity)
        if not self._auth.open:
            try:
                state: HintsState = await self._call("hints_state", HintsNamed(arguments.job, arguments.identity))
            except NotFound:
                if verb != "hints_close":
                    raise
            else:
                self._auth.require(identity, "read", whose_versions(state.bucket) or state.bucket, state.prefix)
        await self._answer(exchange, verb, arguments)

    def _owned(self, arguments: Any, identity: Identity) -> Any:
        return msgspec.structs.replace(arguments, identity=self._auth.owner(identity))

    async def _answer(self, exchange: Exchange, verb: str, arguments: Any) -> None:
        exchange.respond(200, JSON, encode(await self._call(verb, arguments)))
