"""How much of a front anybody may hold before it is known who that is: connections by address, and bytes.

Theory. Whoever can reach the port can open connections and begin requests. Each of these costs a little, and the sum is
bounded in two ways, so that one client does not take everything from the others. Connections: there are so many in all,
and one address holds at most a share of them (an IPv6 client has a whole /64, which counts as one address). Bytes:
unfinished heads, requests that wait for their turn, and bodies that come before a proof share one budget, of which one
address has the same share. Who has proved an identity, or needs none, does not count against it.

Behind a load balancer or NAT all clients have one address: there the operator sets the share to 1. (Rejected: believing
`X-Forwarded-For`, which anybody can write; leaving loopback out, since a runaway program on the host is the commonest
of such clients.)

What is refused is counted, and said in the log once a minute: a line for each would be one more thing to exhaust.

Invariants. (1) `held_bytes` is the sum of what was held and not let go. (2) An address is in the table while it has a
connection.
"""

from __future__ import annotations

import ipaddress
import logging

from forebay.core import limits
from forebay.core.errors import Busy
from forebay.node.front.http.counts import FrontCounts

log = logging.getLogger("forebay.http")

SAY_EVERY_S = 60.0
_NETWORK_BITS = 64  # of an IPv6 address: what one client is given


class Admission:
    """One per front. `share` is the part of `connections_max` and `bytes_max` that one address may hold."""

    def __init__(
        self,
        counts: FrontCounts,
        connections_max: int = limits.CONNECTIONS_MAX,
        share: float = limits.ADDRESS_SHARE,
        bytes_max: int = limits.UNPROVED_BYTES_MAX,
    ) -> None:
        self.connections_max = connections_max
        self.of_one_max = max(1, int(connections_max * share))
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._share = share
        self._bytes_of: dict[str, int] = {}
        self._counts = counts
        self._open = 0
        self._of: dict[str, int] = {}
        self._refused: dict[str, int] = {}  # by address, since it was last said
        self._refused_bytes = 0
        self._said_s = -SAY_EVERY_S

    def enter(self, peer: str) -> None:
        """Count a connection from `peer`; `Busy` if it is one too many."""
        address = _address(peer)
        held = self._of.get(address, 0)
        if self._open < self.connections_max and held < self.of_one_max:
            self._open += 1
            self._of[address] = held + 1
            return
        self._counts.connections_refused += 1
        if len(self._refused) < limits.CONNECTIONS_MAX or address in self._refused:
            self._refused[address] = self._refused.get(address, 0) + 1
        if self._open >= self.connections_max:
            raise Busy("this front has as many connections as it may: try again, or use fewer", retry_after_s=1.0)
        self._counts.connections_over_share += 1
        raise Busy(
            f"your address holds {held} connections to this front, as many as one may: use fewer, or have "
            "connections_share raised (behind a load balancer to 1)",
            retry_after_s=1.0,
        )

    def leave(self, peer: str) -> None:
        """A connection that entered has ended."""
        address = _address(peer)
        self._open -= 1
        left = self._of[address] - 1
        if left:
            self._of[address] = left
        else:
            del self._of[address]

    def hold(self, peer: str, more_bytes: int) -> bool:
        """Whether `more_bytes` of somebody unproved may be kept. Less than 0: so many are let go."""
        address = _address(peer)
        held = self._bytes_of.get(address, 0) + more_bytes
        if more_bytes > 0 and (
            self.held_bytes + more_bytes > self.bytes_max or held > int(self.bytes_max * self._share)
        ):
            self._refused_bytes += 1
            return False
        self.held_bytes += more_bytes
        assert held >= 0, "let go twice"
        if held:
            self._bytes_of[address] = held
        else:
            self._bytes_of.pop(address, None)
        return True

    def say(self, now_s: float) -> None:
        """Write into the log what was refused; does so once a minute, however often it is called."""
        if now_s - self._said_s < SAY_EVERY_S or not (self._refused or self._refused_bytes):
            return
        self._said_s = now_s
        if self._refused:
            most = max(self._refused, key=lambda address: self._refused[address])
            log.warning(
                "%d connections from %d addresses were refused, %d of them from %s: this front has %d of %d, and one "
                "address may hold %d (connections_share)",
                sum(self._refused.values()), len(self._refused), self._refused[most], most, self._open,
                self.connections_max, self.of_one_max,
            )  # fmt: skip
        if self._refused_bytes:
            log.warning(
                "%d requests were refused: %d bytes are held for clients that have proved nothing, of %d; one address "
                "may have %d (connections_share)",
                self._refused_bytes, self.held_bytes, self.bytes_max, int(self.bytes_max * self._share),
            )  # fmt: skip
        self._refused.clear()
        self._refused_bytes = 0


def _address(peer: str) -> str:
    """What counts as one address."""
    if ":" not in peer:
        return peer
    try:
        address = ipaddress.IPv6Address(peer.partition("%")[0])
    except ValueError:
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> _NETWORK_BITS << _NETWORK_BITS, _NETWORK_BITS)))
