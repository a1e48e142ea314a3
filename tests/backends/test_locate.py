"""From URL, options, environment and profiles to a place and its credentials, as each cloud's users expect."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from bench import servers
from forebay.backends import locate
from forebay.backends.azure import container
from forebay.backends.gcs import credentials as google
from forebay.backends.s3 import credentials as aws
from forebay.backends.stack import open_backend
from forebay.core.errors import Denied, Invalid, NoBackendBucket, NotFound, NotSupported, Unavailable
from forebay.core.types import Bucket
from forebay.ports.clock import SystemClock
from tests.backends.backend_places import read, run, s3_client
from tests.backends.scripted_http import Asked, ScriptedServer, answer

CLOCK = SystemClock()


def find(options: dict[str, str], environment: dict[str, str], home: Path, bucket: str = "corpus") -> aws.S3Place:
    return aws.find_place(bucket, options, {"HOME": str(home), **environment}, CLOCK)


# --- URLs and options ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("ftp://host/x", {}, "no scheme that is known"),
        ("corpus", {}, "no scheme that is known"),
        ("s3://", {}, "names no bucket"),
        ("s3://b/x?y=1", {}, "query"),
        ("s3://key:secret@b/x", {}, "carries credentials"),
        ("s3://b/a/../c", {}, "'..'"),
        ("https://host/%2e%2e/c", {}, "'..'"),
        ("file://relative/x", {}, "not absolute"),
        ("s3://b", {"regoin": "eu"}, "known options are access_key_id, addressing_style"),
        ("file:///x", {"region": "eu"}, r"known options are \(none\)"),
        ("s3://b", {"skip_signature": "yes"}, "use true or false"),
        ("s3://b", {"addressing_style": "diagonal", "skip_signature": "true"}, "path or virtual"),
        ("s3://b", {"endpoint": "host:9000", "skip_signature": "true"}, "http://host:port"),
        ("s3://b", {"access_key_id": "a"}, "go together"),
        ("s3://b", {"profile": "nobody"}, "no profile"),
        ("s3://b", {"root_certificate": "/nowhere.pem", "skip_signature": "true"}, "cannot be read"),
        ("gs://b", {"service_account": "/nowhere.json"}, "cannot be read"),
        ("gs://b", {"service_account_key": "{}"}, "lack client_email"),
        ("gs://b", {"service_account_key": "not json"}, "not JSON"),
        ("az://c", {}, "account is not named"),
        ("az://c", {"account_name": "a", "account_key": "???"}, "not base64"),
    ],
)
def test_what_is_wrong_is_said_at_once(
    url: str, options: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Invalid, match=says):
        open_backend(Bucket("corpus", url, options=options))


def test_no_message_shows_a_secret(tmp_path: Path) -> None:
    options = {"access_key_id": "AKID", "secret_access_key": "TOPSECRET", "session_token": "TOKENSECRET"}
    place = find(options, {}, tmp_path)
    assert place.credentials is not None
    shown = f"{place!r} {place.credentials.current()!r} {google.Token('TOPSECRET', None)!r}"
    assert "SECRET" not in shown
    azure_place = container.find_place("c", {"account_name": "a", "account_key": "U0VDUkVU"}, {}, CLOCK)
    assert "U0VDUkVU" not in repr(azure_place)


# --- S3 --------------------------------------------------------------------------------------------------------------
def test_where_an_s3_bucket_is(tmp_path: Path) -> None:
    anonymous = {"skip_signature": "true"}
    assert find(anonymous, {}, tmp_path).url == "https://corpus.s3.us-east-1.amazonaws.com"
    assert find(anonymous, {}, tmp_path, "my.dots").url == "https://s3.us-east-1.amazonaws.com/my.dots"
    assert find({**anonymous, "region": "cn-north-1"}, {}, tmp_path).url.endswith("cn-north-1.amazonaws.com.cn")
    assert find({**anonymous, "endpoint": "http://h:1/"}, {}, tmp_path).url == "http://h:1/corpus"
    virtual = {**anonymous, "endpoint": "https://h:1", "addressing_style": "virtual"}
    assert find(virtual, {}, tmp_path).url == "https://corpus.h:1"


def test_options_beat_environment_beats_profile(tmp_path: Path) -> None:
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "config").write_text(
        "[default]\nregion = eu-central-1\n[profile work]\nregion = eu-west-2\nendpoint_url = http://work:9\n"
    )
    (folder / "credentials").write_text(
        "[default]\naws_access_key_id = DEFAULT\naws_secret_access_key = d\n"
        "[work]\naws_access_key_id = WORK\naws_secret_access_key = w\naws_session_token = t\n"
    )
    keys = {"AWS_ACCESS_KEY_ID": "ENV", "AWS_SECRET_ACCESS_KEY": "e"}

    def who(options: dict[str, str], environment: dict[str, str]) -> tuple[str, str]:
        place = find(options, environment, tmp_path)
        assert place.credentials is not None
        return place.credentials.current().access_key_id, place.region

    assert who({}, {}) == ("DEFAULT", "eu-central-1")
    assert who({}, {"AWS_PROFILE": "work"}) == ("WORK", "eu-west-2")
    assert who({"profile": "work"}, {}) == ("WORK", "eu-west-2")
    assert who({}, keys) == ("ENV", "eu-central-1")
    assert who({"profile": "work"}, keys) == ("WORK", "eu-west-2"), "a profile named in the options beats keys set"
    assert who({"access_key_id": "OPT", "secret_access_key": "o"}, keys)[0] == "OPT"
    assert who({}, {**keys, "AWS_REGION": "ap-south-1"})[1] == "ap-south-1"
    assert who({"region": "sa-east-1"}, {**keys, "AWS_REGION": "ap-south-1"})[1] == "sa-east-1"
    assert find({"profile": "work"}, {}, tmp_path).url == "http://work:9/corpus"
    work = find({"profile": "work"}, {}, tmp_path).credentials
    assert work is not None
    assert work.for_obstore()["token"] == "t"


def test_keys_of_a_profile_are_read_again_when_they_are_old(tmp_path: Path) -> None:
    class Later:
        def __init__(self) -> None:
            self.now_s = 1e9

        def wall_s(self) -> float:
            return self.now_s

        def monotonic_s(self) -> float:
            return self.now_s

    clock = Later()
    folder = tmp_path / ".aws"
    folder.mkdir()
    file = folder / "credentials"
    file.write_text("[default]\naws_access_key_id = ONE\naws_secret_access_key = x\n")
    place = aws.find_place("corpus", {}, {"HOME": str(tmp_path)}, clock)
    assert place.credentials is not None
    assert place.credentials.current().access_key_id == "ONE"
    file.write_text("[default]\naws_access_key_id = TWO\naws_secret_access_key = x\n")
    assert place.credentials.current().access_key_id == "ONE"
    clock.now_s += aws.KEEP_S
    assert place.credentials.current().access_key_id == "TWO"


def test_a_profile_that_asks_a_program_is_asked_through_the_vendors_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "helper"
    said = {"Version": 1, "AccessKeyId": "PROC", "SecretAccessKey": "p", "SessionToken": "t"}
    helper.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    helper.chmod(0o755)
    (tmp_path / "config").write_text(f"[profile asks]\ncredential_process = {helper}\n")
    environment = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "HOME": str(tmp_path)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place = aws.find_place("corpus", {"profile": "asks"}, environment, CLOCK)
    assert place.credentials is not None
    assert place.credentials.current().access_key_id == "PROC"


@pytest.mark.real
def test_a_profile_opens_a_bucket_for_reading_and_for_listing(
    seaweed_keys: servers.SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seaweed_keys.create_bucket("profiled")
    s3_client(seaweed_keys).put_object(Bucket="profiled", Key="k", Body=b"v")  # type: ignore[attr-defined]
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(f"[profile weed]\nendpoint_url = {seaweed_keys.endpoint}\n")
    (tmp_path / ".aws" / "credentials").write_text(
        f"[weed]\naws_access_key_id={seaweed_keys.access_key}\naws_secret_access_key={seaweed_keys.secret_key}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))

    async def story() -> None:
        backend = open_backend(Bucket("corpus", "s3://profiled", options={"profile": "weed"}))
        await backend.probe()
        assert await read(backend, "k") == b"v"
        assert [entry.key for entry in (await backend.list_page("", "", "", 10)).entries] == ["k"]
        await backend.aclose()

    run(story())


@pytest.mark.real
def test_a_bad_backend_is_named_by_its_probe(seaweed_keys: servers.SeaweedFS, azurite: servers.Azurite) -> None:
    good = seaweed_keys.options()
    wrong_keys = {**good, "secret_access_key": "wrong"}
    nobody = {"endpoint": good["endpoint"], "skip_signature": "true"}
    seaweed_keys.create_bucket("there")
    cases = [
        (Bucket("c", "s3://not-there", options=good), NoBackendBucket),
        (Bucket("c", "s3://there", options=wrong_keys), Denied),
        (Bucket("c", "s3://there", options=nobody), Denied),
        (Bucket("c", "s3://there", options={**good, "endpoint": "http://127.0.0.1:1"}), Unavailable),
        (Bucket("c", "s3://there", options={**good, "endpoint": "http://no.such.host.invalid"}), Unavailable),
        (Bucket("c", "az://not-there", options=azurite.options()), NoBackendBucket),
        (Bucket("c", "az://there", options={**azurite.options(), "account_key": "d3Jvbmc="}), Denied),
        (Bucket("c", "http://127.0.0.1:1/"), Unavailable),
        (Bucket("c", "file:///not/there"), NoBackendBucket),
    ]

    async def story() -> None:
        for bucket, kind in cases:
            backend = open_backend(bucket)
            with pytest.raises(kind):
                await backend.probe()
            await backend.aclose()
        for endpoint, says in {"http://127.0.0.1:1": "refused", "http://no.such.host.invalid": "not known"}.items():
            backend = locate.locate(Bucket("c", "s3://there", options={**good, "endpoint": endpoint}))
            with pytest.raises(Unavailable, match=says):
                await backend.fetch("k")
            await backend.aclose()

    run(story())


# --- the network in between ------------------------------------------------------------------------------------------
def serve_anything(asked: Asked) -> bytes:
    if "list-type" in asked.target:
        return answer("200 OK", b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
    return answer("200 OK", b"body", etag='"e"', last_modified="Fri, 02 Jan 2026 03:04:05 GMT")


def test_a_private_authority_is_trusted_when_it_is_named_and_only_then(tmp_path: Path) -> None:
    openssl = servers.find_program("openssl", "apt-get install openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    names = [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-addext",
        "basicConstraints=critical,CA:FALSE",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run([openssl, *request, *names], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def story() -> None:
        with ScriptedServer(serve_anything, context) as server:
            options = {"endpoint": server.url, "skip_signature": "true"}
            for trusting in ({"root_certificate": str(certificate)}, {"allow_invalid_certificates": "true"}):
                backend = locate.locate(Bucket("corpus", "s3://corpus", options={**options, **trusting}))
                assert await read(backend, "plain") == b"body"
                await backend.list_page("", "", "", 10)
                await backend.aclose()
            backend = locate.locate(Bucket("corpus", "s3://corpus", options=options))
            with pytest.raises(Unavailable, match="root_certificate"):
                await backend.fetch("plain")
            with pytest.raises(Unavailable, match="certificate"):
                await backend.list_page("", "", "", 10)
            await backend.aclose()

    run(story())


def test_a_proxy_carries_reads_and_listings_alike() -> None:
    async def story() -> None:
        with ScriptedServer(serve_anything) as proxy:
            options = {"endpoint": "http://s3.example", "skip_signature": "true", "proxy_url": proxy.url}
            backend = open_backend(Bucket("corpus", "s3://corpus", options=options))
            assert await read(backend, "plain") == b"body"
            await backend.list_page("", "", "", 10)
            for asked in proxy.asked:
                assert asked.target.startswith("http://s3.example/corpus")
                assert asked.headers["host"] == "s3.example"
            await backend.aclose()

    run(story())


# --- Google ----------------------------------------------------------------------------------------------------------
def token_answer(asked: Asked) -> bytes:
    return answer("200 OK", json.dumps({"access_token": "tok", "expires_in": 3600}).encode())


def test_a_service_account_signs_for_its_token(tmp_path: Path) -> None:
    key, public = tmp_path / "key.pem", tmp_path / "public.pem"
    openssl = servers.find_program("openssl", "apt-get install openssl")
    generate = ["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(key)]
    subprocess.run([openssl, *generate], check=True, capture_output=True)
    subprocess.run([openssl, "pkey", "-in", str(key), "-pubout", "-out", str(public)], check=True, capture_output=True)
    with ScriptedServer(token_answer) as server:
        account = {
            "type": "service_account",
            "client_email": "robot@project",
            "private_key": key.read_text(),
            "token_uri": f"{server.url}/token",
        }
        path = tmp_path / "account.json"
        path.write_text(json.dumps(account))
        tokens = google.find_tokens({}, {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}, False, CLOCK)
        assert tokens is not None
        assert tokens.current().text == "tok"
        assert tokens.current().text == "tok"
        assert len(server.asked) == 1, "a token is kept"
        form = parse_qs(server.asked[0].body.decode())
    header, claims, signature = form["assertion"][0].split(".")
    assert json.loads(_unbase64(claims))["iss"] == "robot@project"
    (tmp_path / "signed").write_text(f"{header}.{claims}")
    (tmp_path / "signature").write_bytes(_unbase64(signature))
    verify = ["dgst", "-sha256", "-verify", str(public), "-signature", str(tmp_path / "signature")]
    subprocess.run([openssl, *verify, str(tmp_path / "signed")], check=True, capture_output=True)


def _unbase64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def test_a_users_login_is_refreshed_and_a_refusal_is_denied(tmp_path: Path) -> None:
    replies = [token_answer, lambda _: answer("400 Bad Request", b'{"error": "invalid_grant"}')]
    with ScriptedServer(lambda asked: replies.pop(0)(asked)) as server:
        folder = tmp_path / ".config" / "gcloud"
        folder.mkdir(parents=True)
        login = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "r"}
        (folder / "application_default_credentials.json").write_text(json.dumps({**login, "token_uri": server.url}))
        for expected in ("tok", None):
            tokens = google.find_tokens({}, {"HOME": str(tmp_path)}, False, CLOCK)
            assert tokens is not None
            if expected:
                assert tokens.current().text == expected
                assert parse_qs(server.asked[0].body.decode())["refresh_token"] == ["r"]
            else:
                with pytest.raises(Denied, match="invalid_grant"):
                    tokens.current()


def test_the_metadata_server_is_asked_last_and_its_absence_is_explained(tmp_path: Path) -> None:
    with ScriptedServer(token_answer) as server:
        host = server.url.removeprefix("http://")
        tokens = google.find_tokens({}, {"HOME": str(tmp_path), "GCE_METADATA_HOST": host}, False, CLOCK)
        assert tokens is not None
        assert tokens.authorize("GET", "/", "", {})["authorization"] == "Bearer tok"
        assert server.asked[0].headers["metadata-flavor"] == "Google"
    tokens = google.find_tokens({}, {"HOME": str(tmp_path), "GCE_METADATA_HOST": "127.0.0.1:1"}, False, CLOCK)
    assert tokens is not None
    with pytest.raises(Denied, match="no Google credentials were found"):
        tokens.current()


def test_reading_without_credentials_says_where_they_were_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider's own words come back through obstore; a token service that is merely down is worth another try."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")

    async def story() -> None:
        backend = open_backend(Bucket("corpus", "gs://corpus", options={"base_url": "http://127.0.0.1:1"}))
        for ask in (backend.fetch("k"), backend.list_page("", "", "", 1)):
            with pytest.raises(Denied, match="no Google credentials were found"):
                await ask
        await backend.aclose()

        with ScriptedServer(lambda _: answer("503 Service Unavailable")) as server:
            login = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "r"}
            options = {"service_account_key": json.dumps({**login, "token_uri": server.url})}
            bare = locate.locate(Bucket("corpus", "gs://corpus", options=options))
            with pytest.raises(Unavailable, match="gives no token now"):
                await bare.fetch("k")
            await bare.aclose()

    run(story())


def test_federated_google_identities_are_refused_with_a_way_round(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="print-access-token"):
        google.find_tokens({"service_account_key": '{"type": "external_account"}'}, {}, False, CLOCK)


def test_a_bearer_token_travels_with_reads_and_listings(tmp_path: Path) -> None:
    def serve(asked: Asked) -> bytes:
        if "list-type" in asked.target:
            return answer("200 OK", b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        return answer("200 OK", b"body", etag='"e"', last_modified="Fri, 02 Jan 2026 03:04:05 GMT")

    async def story() -> None:
        with ScriptedServer(serve) as server:
            options = {"base_url": server.url, "bearer_token": "my-token"}
            backend = open_backend(Bucket("corpus", "gs://corpus", options=options))
            assert await read(backend, "plain") == b"body"
            assert await read(backend, "un//tidy") == b"body"
            await backend.list_page("", "", "", 10)
            assert [asked.headers["authorization"] for asked in server.asked] == ["Bearer my-token"] * 3
            await backend.aclose()

    run(story())


# --- Azure -----------------------------------------------------------------------------------------------------------
@pytest.mark.real
def test_a_connection_string_opens_a_container(azurite: servers.Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    azurite.create_container("by-string")
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName={azurite.account};AccountKey={azurite.key};"
        f"BlobEndpoint={azurite.endpoint};",
    )

    async def story() -> None:
        backend = open_backend(Bucket("corpus", "az://by-string"))
        await backend.probe()
        with pytest.raises(NotFound):
            await backend.fetch("nothing")
        await backend.aclose()

    run(story())


def test_azure_logins_ask_the_right_service(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("federated")
    with ScriptedServer(token_answer) as server:
        login = {"account_name": "a", "client_id": "i", "tenant_id": "t", "authority_host": server.url}
        for extra, field, value in (
            ({"client_secret": "s"}, "client_secret", "s"),
            ({"federated_token_file": str(tmp_path / "token")}, "client_assertion", "federated"),
        ):
            place = container.find_place("c", {**login, **extra}, {}, CLOCK)
            assert place.for_obstore()["token"] == "tok"
            assert server.asked[-1].target == "/t/oauth2/v2.0/token"
            assert parse_qs(server.asked[-1].body.decode())[field] == [value]
        app_service = {"IDENTITY_ENDPOINT": server.url, "IDENTITY_HEADER": "h"}
        place = container.find_place("c", {"account_name": "a"}, app_service, CLOCK)
        assert place.for_obstore()["token"] == "tok"
        assert server.asked[-1].headers["x-identity-header"] == "h"


def test_a_shared_access_signature_goes_with_every_request() -> None:
    def serve(asked: Asked) -> bytes:
        if "comp=list" in asked.target:
            return answer("200 OK", b"<EnumerationResults><Blobs/><NextMarker/></EnumerationResults>")
        return answer("200 OK", b"body", etag='"e"', last_modified="Fri, 02 Jan 2026 03:04:05 GMT")

    async def story() -> None:
        with ScriptedServer(serve) as server:
            options = {"account_name": "a", "endpoint": server.url, "sas_token": "?sv=1&sig=a%2Bb%3D"}
            backend = open_backend(Bucket("corpus", "az://c", options=options))
            assert await read(backend, "plain") == b"body"
            assert await read(backend, "un//tidy") == b"body"
            await backend.list_page("", "", "", 10)
            for asked in server.asked:
                assert parse_qs(asked.target.partition("?")[2])["sig"] == ["a+b="]
                assert "authorization" not in asked.headers
            await backend.aclose()

    run(story())


@pytest.mark.real
def test_azure_pages_cost_one_request_each_and_any_position_is_found(azurite: servers.Azurite) -> None:
    azurite.create_container("paged")

    async def story() -> None:
        bucket = Bucket("corpus", "az://paged", options=azurite.options())
        backend = locate.locate(bucket)
        store = backend._store  # type: ignore[attr-defined]
        await asyncio.gather(*[store.put_async(f"k{number:02}", b"") for number in range(30)])
        asked = []
        wire = backend._wire  # type: ignore[attr-defined]
        ask = wire.ask
        wire.ask = lambda query, **more: asked.append(query) or ask(query, **more)
        after, pages = "", 0
        while True:
            page = await backend.list_page("", "", after, 7)
            pages += 1
            if not page.next_after:
                break
            after = page.next_after
        assert (pages, len(asked)) == (5, 5)
        page = await backend.list_page("", "", "k23x", 3)
        assert [entry.key for entry in page.entries] == ["k24", "k25", "k26"]
        page = await backend.list_page("", "", page.next_after, 3)
        assert [entry.key for entry in page.entries] == ["k27", "k28", "k29"]
        await backend.aclose()

    run(story())


# --- descriptors -----------------------------------------------------------------------------------------------------
WITHOUT_FILES = """
import asyncio, os, resource
from forebay.backends.locate import locate
from forebay.core.errors import Unavailable
from forebay.core.types import Bucket

async def story():
    options = {"endpoint": "http://127.0.0.1:9", "region": "us-east-1", "skip_signature": "true"}
    backend = locate(Bucket("corpus", "s3://corpus", options=options))
    assert backend._store is not None  # made, and never asked
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20,) * 2)
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(2):
        try:
            await backend.fetch("key")
        except Unavailable as error:
            print(error)
        for each in held:
            os.close(each)
        held = []

asyncio.run(story())
"""


def test_a_first_read_without_descriptors_is_an_error_that_says_so() -> None:
    """obstore panics then, which is no `Exception`: whoever waited for the bytes would wait for ever."""
    run = subprocess.run([sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    short, closed = run.stdout.splitlines()
    assert "raise `ulimit -n`" in short
    assert "Connection refused" in closed, "with descriptors it asks again, by itself"
