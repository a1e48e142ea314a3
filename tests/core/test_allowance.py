"""What an identity may do in a second, against a dumb model, and who may read what stands in the identities file."""

from __future__ import annotations

import random

import pytest

from forebay.core import keyfile
from forebay.core.access import decode_identities, encode_identities
from forebay.core.errors import Invalid
from forebay.core.machines.allowance import BURST_S, Limits, charge, wait_s


@pytest.mark.parametrize("seed", range(20))
def test_the_rate_holds_over_any_time(seed: int) -> None:
    chance = random.Random(seed)
    per_s = chance.choice([0.5, 3.0, 1000.0])
    now_s = begun_s = chance.uniform(0, 1e6)
    paid_s, taken, largest = 0.0, 0.0, 0.0
    for _ in range(2000):
        now_s += chance.expovariate(per_s) * chance.choice([0, 0.1, 1, 3])
        amount = chance.choice([1, 1, chance.uniform(0, 5)])
        wait = wait_s(paid_s, now_s)
        assert wait >= 0
        if wait == 0:
            before, paid_s = paid_s, charge(paid_s, now_s, amount, per_s)
            taken, largest = taken + amount, max(largest, amount)
            assert paid_s >= before
        else:
            assert wait_s(paid_s, now_s + wait * 1.000001 + 1e-6) == 0, "who waits so long is let in"
        assert taken <= per_s * (now_s - begun_s + BURST_S) + largest + 1e-3


def test_who_did_nothing_has_one_burst_and_no_more() -> None:
    paid_s, now_s = 0.0, 1000.0
    let_in = 0
    while wait_s(paid_s, now_s) == 0:
        paid_s = charge(paid_s, now_s, 1, 8.0)
        let_in += 1
    assert let_in == 9, "a second's worth, and the one after which nothing is left"


def test_limits_stand_in_the_identities_file() -> None:
    text = b"""{"identities": [
      {"name": "a", "token": "t", "limits": {"requests_per_s": 2.5, "bytes_per_s": "100MiB/s", "connections": 3}},
      {"name": "b", "token": "u"}]}"""
    file = keyfile.parse(text)
    assert keyfile.parse(keyfile.render(file)) == file
    identities = keyfile.identities_of(file, lambda sealed, key_id: sealed)
    assert [identity.limits for identity in identities] == [Limits(2.5, 100 * 2**20, 3), None]
    assert decode_identities(encode_identities(identities)) == identities


@pytest.mark.parametrize(
    "limits",
    ['{"requests_per_s": -1}', '{"bytes_per_s": "fast"}', '{"connections": 1e9}', '{"request_per_s": 1}', '"100"'],
)
def test_what_can_be_no_limit_is_refused(limits: str) -> None:
    with pytest.raises(Invalid):
        keyfile.parse(b'{"identities": [{"name": "a", "token": "t", "limits": %b}]}' % limits.encode())
