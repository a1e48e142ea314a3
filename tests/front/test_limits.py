"""Limits of an identity at a front: requests, bytes, connections; who is over them waits, and nobody else does."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator

import msgspec
import pytest

from forebay.core import limits as bounds
from forebay.core.access import Identity, encode_identities, parse_grants
from forebay.core.errors import Busy, Invalid
from forebay.core.machines.allowance import Limited, Limits, loosest
from forebay.core.oidc import Rule, check_issuers, encode_trusted
from forebay.node.front.http.accounts import Account, Accounts, make_shared
from tests.front.fake_engine import Answer, Client, Node
from tests.front.web_tokens import issuer, token, trusted

Eventually = Callable[[Callable[[], bool]], None]
AT = "/-/v1/objects/b/k"


def identity(name: str, limits: Limits | None) -> Identity:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return Identity(name, token_sha256=digest, grants=parse_grants("read:b,write:b,observe:*"), limits=limits)


@pytest.fixture
def limited(node: Node) -> Callable[..., None]:
    """Have the node know `team` with these limits, and `other` without."""
    node.put("k", b"x" * 5000)

    def limit(requests_per_s: float = 0, bytes_per_s: float = 0, connections: int = 0) -> None:
        known = [identity("team", Limits(requests_per_s, bytes_per_s, connections)), identity("other", None)]
        node.call(lambda: node.front._auth.update(encode_identities(known)))

    return limit


def ask(client: Client, who: str = "team", method: str = "GET", body: bytes = b"") -> Answer:
    return client.ask(AT, method, body, Authorization=f"Bearer {who}")


def value(node: Node, name: str) -> float:
    return node.call(lambda: node.front._auth.accounts.values()).get(name, 0)


def test_requests_over_the_limit_wait_and_others_do_not(node: Node, limited: Callable[..., None]) -> None:
    limited(requests_per_s=0.001)
    with node.connect() as client, node.connect() as another:
        assert ask(client).status == 200
        for each in (client, another):
            refused = ask(each)
            assert (refused.status, b'"Busy"' in refused.body, b"TooManyRequests" in refused.body) == (429, True, True)
            assert 900 < int(refused.headers["retry-after"]) <= 1000
            assert ask(each, "other").body == b"x" * 5000, "on the same connection, too"
    assert value(node, 'forebay_limit_refusals_total{identity="team",limit="requests"}') == 2
    assert value(node, 'forebay_limited_requests_total{identity="team"}') == 1
    limited()
    with node.connect() as client:
        assert [ask(client).status for _ in range(5)] == [200] * 5


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_bytes_are_paid_for_afterwards(node: Node, limited: Callable[..., None], method: str) -> None:
    limited(bytes_per_s=10)
    with node.connect() as client:
        assert ask(client, method=method, body=b"" if method == "GET" else b"y" * 5000).status in (200, 201)
        refused = ask(client)
        assert (refused.status, 450 < int(refused.headers["retry-after"]) < 700) == (429, True)
        assert ask(client, "other").status == 200
    assert 5000 < value(node, 'forebay_limited_bytes_total{identity="team"}') < 7000


def test_a_body_that_is_not_wanted_is_refused_before_it_comes(node: Node, limited: Callable[..., None]) -> None:
    limited(requests_per_s=0.001)
    with node.connect() as client:
        assert ask(client).status == 200
        client.send(b"PUT %b HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer team\r\n" % AT.encode())
        client.send(b"Expect: 100-continue\r\nContent-Length: 1000000\r\n\r\n")
        assert client.answer("PUT").status == 429


def test_connections_count_until_they_end(node: Node, limited: Callable[..., None], eventually: Eventually) -> None:
    limited(connections=2)
    held = 'forebay_limited_connections{identity="team"}'
    with node.connect() as first, node.connect() as second, node.connect() as third:
        assert [ask(first).status, ask(second).status, ask(first).status] == [200] * 3
        refused = ask(third)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert ask(third, "other").status == 200
        assert ask(second, "other").status == 200
        assert value(node, held) == 2, "who asks on it for another keeps it"
    eventually(lambda: value(node, held) == 0)
    with node.connect() as first, node.connect() as second:
        assert [ask(first).status, ask(second).status] == [200] * 2


def test_a_client_that_reads_nothing_holds_up_nobody(node: Node, limited: Callable[..., None]) -> None:
    node.put("large", os.urandom(8 << 20))
    limited(bytes_per_s=1 << 20, connections=1)
    with node.connect() as stalled, node.connect() as other:
        stalled.send(b"GET /-/v1/objects/b/large HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer team\r\n\r\n")
        for _ in range(50):
            assert ask(other, "other").status == 200
        with node.connect() as more:
            assert ask(more).status == 429


# --- fronts together --------------------------------------------------------------------------------------------------
class Hand:
    """A clock that a test turns."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def fronts(hand: Hand) -> Iterator[list[Accounts]]:
    fd = make_shared()
    yield [Accounts(number, hand, fd) for number in range(3)]
    os.close(fd)


def accounts(fronts: list[Accounts], who: Identity) -> list[Account]:
    for front in fronts:
        front.follow([who])
    return [front.of(who) for front in fronts]


def test_each_person_of_an_issuer_has_the_limits_of_their_rules(node: Node) -> None:
    node.put("k", b"x" * 5000)
    rules = (
        Rule(claim="groups", value="team", allow="read:b", limits=Limited(requests_per_s=0.001)),
        Rule(claim="groups", value="ops", allow="observe:*", limits=Limited(requests_per_s=0.001, connections=2)),
        Rule(claim="groups", value="free", allow="read:b"),
    )

    def told(*given: Rule) -> None:
        said = encode_trusted(trusted(issuer(rules=given)))
        node.call(lambda: node.front._auth.update(encode_identities([identity("other", None)]), said))

    told(*rules)
    people = {name: token(sub=name, groups=["team"]).decode() for name in ("ann", "bob")}
    free = token(sub="eve", groups=["free"]).decode()
    with node.connect() as client:
        for name, who in people.items():  # one waits, and the next does not wait for them
            assert ask(client, who).status == 200
            refused = ask(client, who)
            assert (refused.status, f"oidc:corp:{name} may have".encode() in refused.body) == (429, True)
            assert ask(client, token(sub=name, groups=["team", "free"]).decode()).status == 429, "another token"
        assert [ask(client, who).status for who in (free, free, "other")] == [200] * 3
    assert value(node, 'forebay_limited_requests_total{identity="oidc:corp:ann"}') == 1
    told(*(msgspec.structs.replace(rule, limits=None) for rule in rules))
    with node.connect() as client:
        assert [ask(client, people["ann"]).status for _ in range(3)] == [200] * 3


def test_of_several_rules_the_loosest_limits_hold() -> None:
    assert loosest([]) is None
    assert loosest([Limits(1, 20, 3), Limits(10, 2, 3)]) == Limits(10, 20, 3)
    assert loosest([Limits(1, 20, 3), Limits(0, 2, 0)]) == Limits(0, 20, 0)
    with pytest.raises(Invalid, match="a limit is a number"):
        check_issuers([issuer(rules=(Rule(claim="a", value="b", allow="read:x", limits=Limited(connections=-1)),))])


def test_people_who_come_and_go_are_forgotten_but_not_what_they_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "ACCOUNTS_MAX", 8)
    accounts = Accounts(0, lambda: 100.0)
    limits = Limits(requests_per_s=0.001)
    person = [Identity(f"oidc:corp:{number}", limits=limits, until_s=1.0) for number in range(8)]
    team = Identity("team", limits=limits)
    accounts.follow([team])
    held = accounts.of(person[0])
    held.admit(is_held=False)
    held.hold(1)
    accounts.of(person[1]).admit(is_held=False)
    for one in person[2:]:
        accounts.of(one)
    assert len(accounts.values()) == 8 * 6
    assert accounts.of(person[0]) is held, "it has a connection"
    with pytest.raises(Busy):
        accounts.of(person[1]).admit(is_held=False)
    assert accounts.of(team) is accounts.of(team)


def test_fronts_count_together(fronts: list[Accounts], hand: Hand) -> None:
    team = accounts(fronts, identity("team", Limits(requests_per_s=8, bytes_per_s=8, connections=2)))
    others = accounts(fronts, identity("other", Limits(requests_per_s=8)))
    for turn in range(9):
        team[turn % 3].admit(is_held=True)
    for account in team:
        with pytest.raises(Busy) as caught:
            account.admit(is_held=True)
        assert caught.value.retry_after_s == pytest.approx(1 / 8)
    others[0].admit(is_held=True)
    hand.now_s += 100
    team[0].spent(80)
    hand.now_s += 8.9
    with pytest.raises(Busy, match="bytes"):
        team[1].admit(is_held=True)
    hand.now_s += 0.2
    team[2].admit(is_held=True)
    team[0].hold(1)
    team[1].hold(1)
    assert (team[2].connections, team[2].held) == (2, 0)
    with pytest.raises(Busy, match="connections"):
        team[2].admit(is_held=False)
    team[0].admit(is_held=True)
    team[1].hold(-1)
    team[2].admit(is_held=False)


def test_a_front_that_starts_anew_holds_nothing_and_finds_what_was_used(hand: Hand) -> None:
    fd = make_shared()
    team = identity("team", Limits(requests_per_s=1, connections=3))
    before = [Accounts(number, hand, fd) for number in range(2)]
    first, second = accounts(before, team)
    first.hold(1)
    second.hold(1)
    first.admit(is_held=True)
    first.admit(is_held=True)
    (again,) = accounts([Accounts(0, hand, fd)], team)
    assert again.connections == 1
    with pytest.raises(Busy, match="requests"):
        again.admit(is_held=True)
    os.close(fd)


def test_identities_never_share_a_row_and_more_than_there_are_rows_count_apart(hand: Hand) -> None:
    fd = make_shared()
    one, two = Accounts(0, hand, fd), Accounts(1, hand, fd)
    known = [identity(f"i{number}", Limits(connections=1)) for number in range(1100)]
    one.follow(known)
    two.follow(known)
    for who in known:
        assert one.of(who).connections == 0, "nobody else's"
        one.of(who).hold(1)
    assert sum(two.of(who).connections for who in known) == 1024
    os.close(fd)
