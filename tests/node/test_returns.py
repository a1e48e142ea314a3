"""What a node lost while it lives comes back from the nodes that keep copies of it: a disk, and single objects."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from bench import servers
from tests.cli.conftest import Program
from tests.node.conftest import MIB, NodeProcess, pattern
from tests.node.test_cluster import cluster_of
from tests.node.test_copies_kept import agreed, keep_nothing_once, kept, read, twice, until_covered, written
from tests.node.test_homes import SOON, Cluster, client
from tests.patience import until
from tests.storm.weather import fail_now, mount_disk

pytestmark = pytest.mark.real
Make = Callable[..., NodeProcess]
BODIES = {f"key-{number}": pattern(900 + number * number * 4000, number) for number in range(24)}
GONE = [f"key-{number}" for number in range(3)]


class TwoDisks:
    """A cluster of three nodes, the second of which has two volumes; what it was given is on two nodes each."""

    def __init__(
        self, node: Make, etcd: servers.EtcdCluster, root: Path, lost_after_s: int, lease_s: float = 120.0
    ) -> None:
        self.volumes = [root / "disk-0", root / "disk-1"]

        def make(*given: str) -> NodeProcess:
            config = Path(given[given.index("--config") + 1])
            config.write_text(f"lease = {lease_s}\nvolume_lost_after = {lost_after_s}\n")
            own = [flag for path in self.volumes for flag in ("--volume", str(path))] if len(self.made) == 1 else []
            self.made.append(node(*given, *own))
            return self.made[-1]

        self.made: list[NodeProcess] = []
        self.cluster = Cluster(make, etcd, root, 3, *SOON)
        self.node = self.cluster.nodes[1]
        keep_nothing_once(self.cluster)
        twice(self.cluster)
        for number, (key, body) in enumerate(BODIES.items()):
            for bucket in ("away", "own"):
                asked = self.cluster.clients[number % 3]
                asked.put_object(Bucket=bucket, Key=key, Body=b"earlier")
                asked.put_object(Bucket=bucket, Key=key, Body=body, Metadata={"who": key})
        for key in GONE:
            for bucket in ("away", "own"):
                self.cluster.clients[0].delete_object(Bucket=bucket, Key=key)
        until_covered(self.cluster)

    def lose(self, disk: int, until_done: Callable[[], None] = lambda: None) -> None:
        """The node's machine fails until that is done, and comes back without one of its disks. Within its lease,
        unless that takes longer: a node that says that it stops is taken over at once."""
        self.node.kill()
        until_done()
        self.volumes[disk].rename(self.volumes[disk].with_name("lost"))
        self.volumes[disk].mkdir()
        self.node.start()
        self.cluster.clients[1] = client(self.node)

    def refused(self) -> list[str]:
        """Keys of the local bucket that nobody answers for now."""
        return [key for key in BODIES if self.node.ask("GET", f"/own/{key}")[0] == 503]

    def check(self) -> None:
        for asked in self.cluster.clients:
            for bucket in ("away", "own"):
                for key, body in BODIES.items():
                    if key in GONE:
                        said = until(lambda key=key: (said := self.node.ask("GET", f"/own/{key}")[0]) != 503 and said)
                        assert said == 404, key
                        continue
                    found = until(
                        lambda asked=asked, bucket=bucket, key=key: read(asked, bucket, key), f"{bucket}/{key}"
                    )
                    assert found == (body, {"who": key}), key


def test_a_lost_disk_is_whole_again_without_an_operator(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    two = TwoDisks(node, etcd, tmp_path, 1)
    two.lose(0)
    until(lambda: len(two.node.json("GET", "status")["volumes"]) == 1, "that the disk is done without")
    two.check()
    until_covered(two.cluster)
    assert "came back" in two.node.log
    owed = 2 * (len(BODIES) + 1) - len(GONE)  # with one that says that writes are taken, and the deletes of one bucket
    until(lambda: kept(two.cluster) == owed, "that all is on two nodes again")
    two.node.stop()
    two.volumes[0].rmdir()
    two.volumes[0].with_name("lost").rename(two.volumes[0])
    two.node.start()
    two.cluster.clients[1] = client(two.node)
    assert [each["state"] for each in two.node.json("GET", "status")["volumes"]].count("new") == 1, "it is left alone"
    two.check()


def test_a_node_that_was_taken_over_comes_back_without_one_of_its_disks(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    """Others have all that it had, so it waits for nothing of that."""
    two = TwoDisks(node, etcd, tmp_path, 1, 10.0)
    two.cluster.nodes.pop(1)
    two.lose(0, lambda: until(lambda: agreed(two.cluster).deposed == (two.cluster.ids[1],), "that it is taken over"))
    two.cluster.nodes.insert(1, two.node)
    until(lambda: sorted(agreed(two.cluster).holders) == sorted(two.cluster.ids), "that it holds again")
    assert len(two.node.json("GET", "status")["volumes"]) == 1, "the disk is done without"
    until_covered(two.cluster)
    two.check()


def test_a_volume_is_given_up_when_what_others_keep_of_it_is_back(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    two = TwoDisks(node, etcd, tmp_path, 0)
    two.lose(1)
    refused = until(two.refused, "that what was on the disk is refused")
    assert refused
    program = Program(two.node.endpoint, tmp_path / "cli")
    missing = next(each for each in two.node.json("GET", "status")["volumes"] if each["state"] == "missing")
    told = program("volume", "give-up", missing["volume_id"], code=2)
    assert "--yes" in told.stderr
    time.sleep(1.5)  # as long as the other node waits before it does so by itself
    assert two.refused(), "nobody does it by itself here"
    said = until(lambda: given_up(program, missing["volume_id"]), "that all is known of the cluster")
    assert "came back from other nodes, and nothing is lost" in said
    two.check()
    assert cluster_of(two.node)["active"]


def given_up(program: Program, volume_id: str) -> str:
    with suppress(AssertionError):  # it cannot be done yet
        return program("volume", "give-up", volume_id, "--yes").stdout
    return ""


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Path]]:
    """Two filesystems that can be made to fail."""
    paths = [tmp_path / f"disk-{number}" for number in range(2)]
    try:
        for path in paths:
            path.mkdir()
            if mount_disk(path, 96 * MIB):
                pytest.skip("mounting a filesystem of its own needs root and ext4")
        yield paths
    finally:
        for path in paths:
            subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


def test_a_disk_that_fails_under_a_node_takes_nothing_of_others_along(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path, disks: list[Path]
) -> None:
    """What it kept for others they send again, at once; so one of them may die before anybody mends the disk."""
    two = TwoDisks(node, etcd, tmp_path, 0, 10.0)
    fail_now(disks[0])
    new: list[str] = []
    while "out" not in {each["state"] for each in two.node.json("GET", "status")["volumes"]}:
        new.append(two.cluster.key(2 * (len(new) % 2), "away", 1000 + 50 * len(new)))
        until(partial(written, two.cluster.clients[2 * (len(new) % 2)], "away", new[-1]), f"that {new[-1]} is taken")
        assert len(new) < 400, "nothing is kept on the disk"
    until(lambda: two.cluster.ids[1] in agreed(two.cluster).lost, "that the cluster hears of it")
    until_covered(two.cluster)
    program = Program(two.node.endpoint, tmp_path / "cli")
    failed = next(each for each in two.node.json("GET", "status")["volumes"] if each["state"] == "out")
    said = until(lambda: given_up(program, failed["volume_id"]), "that all of it is back")
    assert "nothing is lost" in said
    until_covered(two.cluster)
    two.cluster.nodes[0].kill()
    gone = two.cluster.nodes.pop(0), two.cluster.clients.pop(0), two.cluster.ids.pop(0)
    until(lambda: agreed(two.cluster).deposed == (gone[2],), "that it is taken over")
    until_covered(two.cluster)
    two.check()
    for key in new:
        assert until(partial(read, two.cluster.clients[0], "away", key), key)[0] == b"warm"
