"""Reading the XML documents that clients send with a request.

Theory. S3's request documents are small and flat: a root, lists of entries, text. They are parsed by the standard
library's expat once they were found harmless: UTF-8 only, and no document type, since entities are the one part of XML
that can make much out of little (and files of ours out of a reference). Namespaces are taken off, because clients send
the documents with and without S3's.

Rejected: a parser dependency for this (defusedxml forbids what is forbidden here in two lines).

Invariant. Only `Invalid` (`MalformedXML`) is raised, whatever the body.
"""

from __future__ import annotations

from typing import NoReturn
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from forebay.core.errors import Invalid


def read_document(body: bytes, root: str) -> Element:
    """The document's root element, whose name must be `root`; all names are without namespaces."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        malformed("it is not UTF-8")
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        malformed("document types are not allowed")
    try:
        found = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError):
        malformed("it cannot be parsed")
    for element in found.iter():
        if not isinstance(element.tag, str):
            malformed("it holds what is no element")
        element.tag = element.tag.rpartition("}")[2]
    if found.tag != root:
        malformed(f"its root is no {root}")
    return found


def text_of(parent: Element, name: str) -> str | None:
    """The text of the child `name`; None if there is none. `Invalid` if there are several."""
    found = parent.findall(name)
    if len(found) > 1:
        malformed(f"{name} is there {len(found)} times")
    return (found[0].text or "") if found else None


def wanted_text(parent: Element, name: str) -> str:
    """The text of the child `name`, which must be there once."""
    text = text_of(parent, name)
    if text is None:
        malformed(f"{parent.tag} has no {name}")
    return text


def texts_of(parent: Element, name: str) -> tuple[str, ...]:
    """The texts of all children `name`, in order."""
    return tuple(child.text or "" for child in parent.findall(name))


def malformed(what: str) -> NoReturn:
    """Raise `Invalid` (`MalformedXML`)."""
    raise Invalid(
        f"The XML you provided was not well-formed or did not validate against our published schema: {what}",
        code="MalformedXML",
    )
