"""AssumeRoleWithWebIdentity, the one operation of AWS's Security Token Service that is served.

Theory. SDKs renew temporary keys by themselves: with a token in a file (`AWS_WEB_IDENTITY_TOKEN_FILE`) and the node as
STS endpoint they need nothing else. The request is a form, POSTed to `/` and not signed: the token in it is the proof.
(minio-py sends the fields in the query.) The keys are worth what the rules for the token's claims say. A role's name is
asked for by every client and decides nothing here; it comes back in the answer. What would narrow the keys (`Policy`,
`PolicyArns`) is refused, since to ignore it would give more than was asked for.

Errors have STS's codes and form, by the table here; SDKs try again after `IDPCommunicationError`.

Invariant. The answer is the only place where the secret of temporary keys is ever written.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid
from forebay.core.oidc import SESSION_S_DEFAULT, SESSION_S_MAX, SESSION_S_MIN
from forebay.core.s3rules.sessions import Session
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.requests import BodySink, BoundedBody, Exchange, Lines, Request, Response, decode_query
from forebay.node.front.http.tokens import Holder
from forebay.node.front.s3.xml import DECLARATION, element, readable

_ACTION: Final = "AssumeRoleWithWebIdentity"
_XMLNS: Final = ' xmlns="https://sts.amazonaws.com/doc/2011-06-15/"'
_TEXT_XML: Final = b"Content-Type: text/xml\r\nCache-Control: no-store\r\n"
_SESSION_NAME: Final = re.compile(r"[\w+=,.@-]{2,64}", re.ASCII)
_ARN_CHARACTERS_MAX: Final = 2048
_STATUS: Final = {
    "AccessDenied": 403,
    "ExpiredTokenException": 400,
    "IDPCommunicationError": 400,
    "InternalFailure": 500,
    "InvalidAction": 400,
    "InvalidIdentityToken": 400,
    "MissingParameter": 400,
    "ServiceUnavailable": 503,
    "ValidationError": 400,
}
_KIND_CODES: Final = {"Denied": "AccessDenied", "Invalid": "ValidationError", "Busy": "ServiceUnavailable"}


def is_sts(request: Request) -> bool:
    """Whether a request to the service itself is for STS: a form, or one in the query."""
    kind = request.headers.get(b"content-type", b"")
    return request.method == b"POST" and (
        kind[:33].lower() == b"application/x-www-form-urlencoded" or request.query.startswith(b"Action=")
    )


class Sts:
    """`lines` are the first header lines of each answer."""

    def __init__(self, auth: Auth, lines: Lines) -> None:
        self._auth = auth
        self._lines = lines

    def take_body(self, request: Request) -> BodySink:
        """Where the form goes. Nobody is known yet."""
        return BoundedBody(limits.WEB_IDENTITY_BODY_BYTES_MAX, proved=False)

    def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer the request whose form is whole."""
        form = decode_query(request.body or request.query)
        action = form.get("Action", "")
        if action != _ACTION:
            raise Invalid(f"the action {action[:60]!r} is not served here: only {_ACTION} is", code="InvalidAction")
        for name in ("RoleArn", "RoleSessionName", "WebIdentityToken"):
            if not form.get(name):
                raise Invalid(f"the request lacks {name}: send it", code="MissingParameter")
        role, name = form["RoleArn"], form["RoleSessionName"]
        if len(role) > _ARN_CHARACTERS_MAX or not role.isprintable() or not _SESSION_NAME.fullmatch(name):
            raise Invalid("RoleArn or RoleSessionName is not as AWS has them: correct it")
        for field in form:
            if field.startswith(("Policy", "ProviderId")):
                raise Invalid(f"{field[:60]} is not served: leave it out, the node's rules say what the keys may")
        asked = form.get("DurationSeconds", str(SESSION_S_DEFAULT))
        if not (asked.isascii() and asked.isdigit() and SESSION_S_MIN <= int(asked[:6]) <= SESSION_S_MAX):
            raise Invalid(f"DurationSeconds is not a number from {SESSION_S_MIN} to {SESSION_S_MAX}: correct it")
        holder, session = self._auth.exchange(form["WebIdentityToken"].encode(), int(asked))
        self._auth.admit(request, session.identity)
        body = _document(_ACTION, _result(role, name, holder, session), _id_of(lines := self._lines(request)))
        exchange.respond(200, lines + _TEXT_XML, body)


def _result(role: str, name: str, holder: Holder, session: Session) -> str:
    ends = datetime.fromtimestamp(session.identity.until_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    keys = (
        element("AccessKeyId", session.key_id)
        + element("SecretAccessKey", session.secret)
        + element("SessionToken", session.token.decode())
        + element("Expiration", ends)
    )
    user = element("Arn", f"{role}/{name}") + element("AssumedRoleId", f"{session.key_id}:{name}")
    return (
        element("SubjectFromWebIdentityToken", readable(holder.subject))
        + element("Audience", readable(holder.issuer.audience))
        + f"<AssumedRoleUser>{user}</AssumedRoleUser><Credentials>{keys}</Credentials>"
        + element("Provider", holder.issuer.issuer)
    )


def _document(action: str, result: str, request_id: str) -> bytes:
    told = f"<ResponseMetadata>{element('RequestId', request_id)}</ResponseMetadata>"
    root = f"{action}Response"
    return f"{DECLARATION}<{root}{_XMLNS}><{action}Result>{result}</{action}Result>{told}</{root}>".encode()


def render_error(error: ForebayError, id_line: bytes) -> Response:
    """The error as STS says it."""
    code = error.code if error.code in _STATUS else _KIND_CODES.get(error.kind, "InternalFailure")
    status = _STATUS[code]
    inner = (
        element("Type", "Receiver" if status >= 500 else "Sender")
        + element("Code", code)
        + element("Message", readable(error.message))
    )
    told = f"<Error>{inner}</Error>" + element("RequestId", _id_of(id_line))
    return Response(status, id_line + _TEXT_XML, f"{DECLARATION}<ErrorResponse{_XMLNS}>{told}</ErrorResponse>".encode())


def _id_of(lines: bytes) -> str:
    return lines.partition(b": ")[2].partition(b"\r\n")[0].decode()
