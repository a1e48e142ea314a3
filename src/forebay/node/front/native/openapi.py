"""The native API's description, made from its table of routes: OpenAPI 3.1, nothing written twice."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from forebay import __version__
from forebay.core.messages.calls import JobCall
from forebay.node.front.native.routes import ROUTES, Route


class ErrorSaid(msgspec.Struct):
    """`kind` is what to act on (docs/protocol.md lists them), `message` says what to do next."""

    kind: str
    message: str
    code: str = ""
    retry_after_s: float = 0.0


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorSaid


def describe() -> bytes:
    """The document as JSON."""
    types = [type_ for route in ROUTES for type_ in (route.body, *_answers(route)) if type_ not in (None, bytes)]
    schemas, components = msgspec.json.schema_components(
        [*types, ErrorBody], ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip([repr(type_) for type_ in (*types, ErrorBody)], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Forebay native API", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(route: Route, by_type: dict[str, Any]) -> dict[str, Any]:
    ok: dict[str, Any] = {"description": "Done."}
    if route.method != "HEAD":
        found = [by_type[repr(type_)] for type_ in _answers(route)]
        ok["content"] = {route.media: {"schema": {"anyOf": found} if len(found) > 1 else found[0] if found else {}}}
    operation: dict[str, Any] = {
        "operationId": f"{route.name}_{route.method.lower()}",
        "summary": route.help,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"{(\w+)}", route.path)
            ),
            *(
                {"name": at.name, "in": "query", "description": at.help, "schema": {"type": at.type}}
                for at in route.query
            ),
        ],
        "responses": {
            "202" if route.body is JobCall else "200": ok,
            "default": {
                "description": "An error, and what to do.",
                "content": {"application/json": {"schema": by_type[repr(ErrorBody)]}},
            },
        },
    }
    if route.body is bytes:
        schema = {"type": "string", "format": "binary"}
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {"schema": schema}}}
    elif route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": by_type[repr(route.body)]}},
        }
    if route.may is not None:
        operation["security"] = [{"token": []}, {}]  # without identities the node is loopback-only and open
    return operation


def _answers(route: Route) -> tuple[Any, ...]:
    if route.answer is None:
        return ()
    return route.answer if isinstance(route.answer, tuple) else (route.answer,)
