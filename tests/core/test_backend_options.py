"""Secrets among a bucket's options: who sees them, and that they stay where they were given for."""

from __future__ import annotations

import msgspec
import pytest

from forebay.backends.locate import OPTIONS
from forebay.core.backend_options import HIDDEN, hide_secrets, is_secret, with_secrets
from forebay.core.errors import Invalid
from forebay.core.s3rules.keeping import OPTIONS as KEEPING_OPTIONS
from forebay.core.types import Bucket

SECRETS = {
    "secret_access_key", "session_token", "service_account_key", "bearer_token", "account_key", "sas_token",
    "client_secret",
}  # fmt: skip
PATHS = {"application_credentials", "federated_token_file"}  # hidden as well: they say where secrets are
KEPT = Bucket(
    "b", "s3://b", options={"endpoint": "https://here", "access_key_id": "id", "secret_access_key": "s", "region": "eu"}
)


def changed(**options: str) -> Bucket:
    return msgspec.structs.replace(hide_secrets(KEPT), options={**hide_secrets(KEPT).options, **options})


def test_every_secret_option_is_hidden_and_no_other() -> None:
    names = {name for options in OPTIONS.values() for name in options}
    assert {name for name in names if is_secret(name, "x")} == SECRETS | PATHS
    assert is_secret("proxy_url", "http://user:word@proxy")
    assert not is_secret("proxy_url", "http://proxy")


def test_what_is_hidden_stays_as_it_was_while_the_place_stands() -> None:
    assert with_secrets(hide_secrets(KEPT), KEPT) == KEPT
    paid = with_secrets(changed(request_payer="true"), KEPT)
    assert paid.options == {**KEPT.options, "request_payer": "true"}
    assert with_secrets(changed(secret_access_key="new", endpoint="https://there"), KEPT).options["endpoint"]
    proxied = msgspec.structs.replace(KEPT, options={**KEPT.options, "proxy_url": "http://u:p@proxy"})
    assert with_secrets(hide_secrets(proxied), proxied) == proxied


def test_a_new_place_needs_its_secret_anew() -> None:
    names = {name for options in OPTIONS.values() for name in options} - SECRETS - PATHS
    for name in names - {"request_payer", "look_before_write", *KEEPING_OPTIONS}:
        with pytest.raises(Invalid, match=rf"option {name} would change.*secret_access_key anew"):
            with_secrets(changed(**{name: "else"}), KEPT)
    with pytest.raises(Invalid, match="the URL would change"):
        with_secrets(msgspec.structs.replace(hide_secrets(KEPT), url="s3://c"), KEPT)
    less = msgspec.structs.replace(KEPT, options={"secret_access_key": HIDDEN})
    with pytest.raises(Invalid, match="endpoint"):
        with_secrets(less, KEPT)
    proxied = msgspec.structs.replace(KEPT, options={**KEPT.options, "proxy_url": "http://u:p@proxy"})
    with pytest.raises(Invalid, match="proxy_url would change"):
        with_secrets(changed(proxy_url="http://u:p@theirs"), proxied)


def test_what_was_not_there_cannot_be_hidden() -> None:
    with pytest.raises(Invalid, match=r"sas_token is .*give its value"):
        with_secrets(changed(sas_token=HIDDEN), KEPT)
    with pytest.raises(Invalid, match="give its value"):
        with_secrets(hide_secrets(KEPT), None)
