"""What is measured, as values: every row of the speed table, its load and the goal it is held to.

Theory. A benchmark is honest when its load can be read in one place, before the code that runs it. So a row here says
the objects, the connections, the link, and the goal as a ratio to the peer or limit measured *in the same run*; the
modules beside this one only carry it out. Absolute numbers are printed and never judged: they belong to the machine.

Scale. The data are sized so that all rows together take minutes: each size says what it stands for. What a row proves
does not depend on it, since every ratio is taken against a peer that had the same bytes.

Words. `ours` is what Forebay did, `theirs` what the peer did or the limit allows; a *round* measures both, one after
the other, and gives one ratio.
"""

from __future__ import annotations

from typing import Any, Literal

from bench.row import GIB, KIB, MB, MIB, REPORTED, Goal, Link, Objects, Row, at_least, at_most

TINY = Objects("tiny", KIB, 1000)
SMALL = Objects("small", 100 * KIB, 200)
MEDIUM = Objects("medium", MIB, 64)
LARGE = Objects("large", 10 * MIB, 16)
HUGE = Objects("huge", GIB, 1)
HUGE_QUICK = Objects("huge", 64 * MIB, 1)
COLD_MEDIUM = Objects("medium", MIB, 48)  # per round and side: what was read once is no longer cold
COLD_LARGE = Objects("large", 10 * MIB, 10)
SHARDS = Objects("shard", MIB, 256)  # stands for a data set: 256 MB at 40 MB/s is as 1.3 TB at 200 GB/h
SHARDS_QUICK = Objects("shard", MIB, 24)

WRITTEN = Objects("written", 10 * MIB, 16)

SAMPLES_100K = Objects("samples-100k", 100_000, 2_000)  # stand for 10,000 and 200,000: the rates are per sample
SAMPLES_10K = Objects("samples-10k", 10_000, 10_000)

PICTURES = Objects("picture", 124_000, 32)
STATE = Objects("state", 1_000 * MB, 1)  # of a model and its optimizer
STATE_QUICK = Objects("state", 80 * MB, 1)

MANY = Objects("many", 100, 1_000_000)
MANY_QUICK = Objects("many-few", 100, 20_000)

WAN = Link(200 * MB, 0.020)
LAN = Link(200 * MB)
NODE_LINK = Link(50 * MB)  # of each node in a box: four of them are what two cores can send beside all else


def _samples(name: str, objects: Objects, what: str, near: float, far: float) -> Row:
    """Of shards, `count` is how many there are."""
    return Row(
        name,
        "client",
        f"random 10 KiB samples as {what}, batches of 256, one core, warm",
        "bench.rows.feeding:samples",
        (objects,),
        (Objects(objects.name, objects.size_bytes, max(2, objects.count // 4)),),
        goals={
            "same host": at_least(near),
            "same host / one GET each": at_least(10.0),
            "TCP": at_least(far),
            "TCP / one GET each": at_least(10.0),
        },
        seconds=1.0,
        peer="limit",
    )


def _loader(objects: Objects, link: Link, *, decode: bool = False) -> Row:
    """Epoch 1 is held to its goal where the bucket is far: nearby, everybody waits for the bucket's own processor."""
    size = f"{objects.size_bytes // 1000} KB"
    first = at_least(1.2) if link.latency_s >= 0.02 and not decode else REPORTED
    return Row(
        f"loader-{objects.size_bytes // 1000}k-{link.latency_s * 1000:.0f}ms{'-decoded' if decode else ''}",
        "loader",
        f"{objects.count:,} samples of {size}{', decoded' if decode else ''}, bucket at {link}",
        "bench.rows.loader:epochs",
        (objects,),
        (Objects(f"{objects.name}-few", objects.size_bytes, 200),),
        link,
        {
            "epoch 1, shards": first,
            "epoch 1, objects": REPORTED,
            "epoch 2, shards": at_least(2.0),
            "epoch 2, objects": REPORTED,
        },
        peer="best peer",
        decode=decode,
    )


def _checkpoint(name: str, what: str, **more: Any) -> Row:
    function = f"bench.rows.checkpoint:{name}"
    return Row(f"checkpoint-{name}", "checkpoint", what, function, (STATE,), (STATE_QUICK,), **more)


def _shape(name: str, what: str) -> Row:
    goals = {"save / raw": at_least(0.9), "load / raw": at_least(0.9)}
    goals |= {f"{verb} / s3torchconnector": at_least(1.0) for verb in ("save", "load")}
    function, size = f"bench.rows.checkpoint_shape:{name}", Objects("state", 1_127_428_915, 1)
    more: dict[str, Any] = {"goals": goals, "rounds": 10, "peer": "best peer"}
    return Row(f"checkpoint-{name}", "checkpoint", what, function, (size,), (STATE_QUICK,), **more)


def _small_cache(size_bytes: int) -> Row:
    goal = at_most(1.1)
    return Row(
        f"small-cache-{size_bytes // 1000}k",
        "client",
        f"epochs of samples of {size_bytes // 1000} KB, the cache smaller than the data: bytes that the bucket sends",
        "bench.rows.small_cache:backend_bytes",
        (Objects("stream", 32 * MIB, 8),),
        (Objects("stream-short", 8 * MIB, 8),),
        goals={
            "shuffle=True, cache of an eighth": goal,
            "shuffle=True, cache of half": goal,
            "as it comes, cache of an eighth": goal,
            "as it comes, cache of half": goal,
        },
        range_bytes=size_bytes,
        peer="direct",
    )


def _first_batch(latency_s: float) -> Row:
    link = Link(latency_s=latency_s)
    return Row(
        f"first-batch-1m-{latency_s * 1000:.0f}ms",
        "loader",
        f"first shuffled batch of 64, 1,000,000 objects of 100 bytes, bucket at {link}",
        "bench.rows.start:first_batch",
        (MANY,),
        (MANY_QUICK,),
        link,
        {"first batch": at_most(0.2), "second job": REPORTED},
        peer="best peer",
    )


def _accelerator(name: str, objects: Objects, few: Objects, what: str) -> Row:
    """As MLPerf Storage has it, on a part of an accelerator: a B200 computes k times faster than what is fed here."""
    goals = {"busy": at_least(1.0, "≥ 90 % where nginx feeds it")}
    function = "bench.accelerator.fed:fed"
    return Row(f"mlperf-{name}", "loader", what, function, (objects,), (few,), goals=goals, peer="nginx")


def _cold_shards() -> Row:
    return Row(
        "first-batch-shards",
        "loader",
        "first batch of 64 of shards that nobody has looked into, 1 GB that stands for any size",
        "bench.rows.cold_shards:first_batch",
        (Objects("cold-shards", 125 * MB, 8),),
        (Objects("cold-shards-few", 40 * MB, 2),),
        Link(20 * MB, 0.020),
        {"first batch": at_most(1.7, "≤ 1.7× (1.5 s)"), "second job": REPORTED},
        peer="limit",
    )


def _warm_rank() -> Row:
    return Row(
        "first-batch-warm",
        "loader",
        "first batch of 64 of epoch 1 of a new rank: 1,000,000 small samples in shards that the node knows",
        "bench.rows.cold_shards:next_epoch",
        (Objects("warm-shards", 51_200_000, 40),),
        (Objects("warm-shards-few", 2_048_000, 3),),
        goals={"first batch": REPORTED, "bytes of the bucket": at_most(0)},
        peer="limit",
    )


def _warm(
    name: str, objects: Objects, what: str, peer: Literal["nginx", "seaweedfs"], goal: Goal, *, signed: bool = False
) -> Row:
    run = "bench.rows.warm:throughput"
    return Row(name, "warm", what, run, (objects,), (objects,), goals={"rate": goal}, peer=peer, signed=signed)


def _cold(name: str, objects: Objects, link: Link, what: str, rate: Goal, first: Goal) -> Row:
    quick = Objects(objects.name, objects.size_bytes, 4)
    goals = {"rate": rate, "first byte": first}
    return Row(name, "cold", what, "bench.rows.cold:throughput", (objects,), (quick,), link, goals)


_SOON = at_most(1.0, "≤ 1.1× + 2 ms")  # measured as (ours - 2 ms) / (1.1 × theirs)

ROWS: tuple[Row, ...] = (
    _warm("warm-1k", TINY, "warm GET 1 KiB", "nginx", at_least(0.70)),
    _warm("warm-100k", SMALL, "warm GET 100 KiB", "nginx", at_least(0.95)),
    _warm("warm-1m", MEDIUM, "warm GET 1 MiB", "nginx", at_least(0.95)),
    _warm("warm-10m", LARGE, "warm GET 10 MiB", "nginx", at_least(0.95)),
    Row(
        "warm-range",
        "warm",
        "warm 1 MiB ranges of a 1 GiB object",
        "bench.rows.warm:throughput",
        (HUGE,),
        (HUGE_QUICK,),
        goals={"rate": at_least(0.95)},
        range_bytes=MIB,
        peer="nginx",
    ),
    _warm("weed-1k", TINY, "warm GET 1 KiB", "seaweedfs", at_least(8)),
    _warm("weed-10m", LARGE, "warm GET 10 MiB", "seaweedfs", at_least(1.5)),
    _warm("signed-1k", TINY, "warm GET 1 KiB, SigV4 checked, each signed anew", "nginx", at_least(0.12), signed=True),
    _cold("cold-1m", COLD_MEDIUM, LAN, "cold GET 1 MiB, 200 MB/s", at_least(0.97), _SOON),
    _cold("cold-10m", COLD_LARGE, LAN, "cold GET 10 MiB, 200 MB/s", at_least(0.97), _SOON),
    _cold("cold-1m-wan", COLD_MEDIUM, WAN, "cold GET 1 MiB, 200 MB/s, 20 ms", at_least(0.97), _SOON),
    _cold("cold-10m-wan", COLD_LARGE, WAN, "cold GET 10 MiB, 200 MB/s, 20 ms", at_least(0.97), _SOON),
    Row(
        "cold-1g",
        "cold",
        "cold GET 1 GiB, 20 ms, 50 MB/s a connection",
        "bench.rows.cold:throughput",
        (Objects("huge", GIB, 1),),
        (Objects("huge", 64 * MIB, 1),),
        Link(0, 0.020, 50 * MB),
        {"rate": at_least(2.0)},
        connections=1,
    ),
    Row(
        "cold-unlimited",
        "cold",
        "cold GET 10 MiB, backend unlimited",
        "bench.rows.cold:throughput",
        (COLD_LARGE,),
        (Objects("large", 10 * MIB, 4),),
        Link(),
        {"rate": at_least(0.6), "first byte": REPORTED},
    ),
    Row(
        "cold-range",
        "cold",
        "1 MiB range of a cold 1 GiB object: backend bytes",
        "bench.rows.cold:ranged",
        (HUGE,),
        (HUGE_QUICK,),
        goals={"backend MiB": at_most(8)},
        range_bytes=MIB,
        peer="limit",
    ),
    Row(
        "cold-crowd",
        "cold",
        "32 readers of one cold 64 MiB object, 200 MB/s",
        "bench.rows.cold:crowd",
        (Objects("crowd", 64 * MIB, 1),),
        (Objects("crowd", 16 * MIB, 1),),
        LAN,
        {
            "slowest / nginx, warm": at_most(1.2),
            "slowest / single": REPORTED,
            "backend bytes / object": at_most(1.01, "each block once"),
        },
        connections=32,
        peer="nginx",
    ),
    Row(
        "epochs",
        "epoch",
        "10 epochs, trainer demand 2.1× the remote rate",
        "bench.rows.epoch:training",
        (SHARDS,),
        (SHARDS_QUICK,),
        Link(40 * MB, 0.010),
        {
            "speed-up": at_least(1.8),
            "first epoch": at_least(0.95),
            "backend bytes / data": at_most(1.02),
        },
        rounds=1,
        connections=8,
        epochs=10,
        demand=2.1,
    ),
    Row(
        "epochs-half",
        "epoch",
        "random epochs, cache holds half the data",
        "bench.rows.epoch:half",
        (Objects("shard", MIB, 512),),
        (Objects("shard", MIB, 64),),
        goals={"hit ratio / (cache/data)": at_least(0.95)},
        rounds=1,
        connections=4,
        epochs=8,
        cache_bytes=256 * MIB,
        quick_cache_bytes=32 * MIB,
        peer="limit",
    ),
    Row(
        "nodes-warm",
        "scale",
        "four clients read 10 MiB objects from 1, 2 and 4 nodes, warm, each client at owners directly",
        "bench.rows.many_nodes:aggregate",
        (Objects("nodes", 10 * MIB, 8),),  # for each node
        (Objects("nodes", MIB, 4),),
        NODE_LINK,
        {"of the links": at_least(0.95), "of SeaweedFS": REPORTED, "node spread": at_most(0.05), "failed": at_most(0)},
        seconds=8.0,
        peer="limit",
    ),
    Row(
        "nodes-1g",
        "scale",
        "one 1 GiB object read by one client with a fast link from 4 nodes, warm",
        "bench.rows.many_nodes:large",
        (HUGE,),
        (HUGE_QUICK,),
        NODE_LINK,
        {"rate": at_least(0.9)},
        peer="limit",
    ),
    Row(
        "nodes-relay",
        "scale",
        "10 MiB objects through a node that does not own them and has none; its CPU without a link's limit",
        "bench.rows.many_nodes:through",
        (Objects("relay", 10 * MIB, 16),),
        (Objects("relay", 4 * MIB, 24),),  # fewer bytes cost nginx no tick of the clock
        NODE_LINK,
        {"rate": at_least(0.9), "CPU": at_most(2.0)},
        peer="limit",
    ),
    Row(
        "nodes-put",
        "scale",
        "PUT 10 MiB objects, acknowledged when they are synced on two nodes; the bucket is out of reach",
        "bench.rows.many_nodes:replicated",
        (Objects("put", 10 * MIB, 48),),
        (Objects("put", MIB, 8),),
        NODE_LINK,
        {"rate": at_least(0.9)},
        peer="limit",
    ),
    Row(
        "nodes-cold",
        "scale",
        "4 nodes read one cold object at once; a fifth that comes reads what they have",
        "bench.rows.many_nodes:cold",
        (Objects("cold", 256 * MIB, 1), Objects("joined", 4 * MIB, 64)),
        (Objects("cold", 16 * MIB, 1), Objects("joined", MIB, 8)),
        goals={"once": at_most(1.02), "joined": at_most(0.001, "0 backend bytes")},
        peer="limit",
    ),
    Row(
        "nodes-fit",
        "scale",
        "shuffled epochs of a corpus that fits three nodes together, and none alone",
        "bench.rows.many_nodes:fits",
        (Objects("fit", MIB, 600),),
        (Objects("fit", MIB, 90),),
        goals={"sent": at_most(0.02)},
        peer="limit",
    ),
    Row(
        "nodes-join",
        "scale",
        "a node comes while 3 have 1,024 files of 1 MiB that the bucket, out of reach, has not; clients read and write",
        "bench.rows.many_nodes:joined",
        (Objects("dirty", MIB, 1024),),
        (Objects("dirty", MIB, 48),),
        NODE_LINK,
        {"beyond": at_most(2.0, "≤ 2 s"), "failed": at_most(0)},
        peer="limit",
    ),
    Row(
        "nodes-crash",
        "scale",
        "a machine of 4 goes away without a word while clients read and write; lease 10 s",
        "bench.rows.many_nodes:crash",
        (Objects("crash", MIB, 16),),
        (Objects("crash", MIB, 4),),
        goals={
            "works again": at_most(12.0, "≤ lease + 2 s"),
            "others": at_most(2.0, "never stop"),
            "failed": at_most(0),
        },
        peer="limit",
    ),
    Row(
        "placement-256",
        "scale",
        "a million keys on 256 nodes of two sizes: how far a node's load is from its weight",
        "bench.rows.many_nodes:placement",
        (Objects("placed", 1, 1_000_000),),
        (Objects("placed", 1, 20_000),),
        goals={"load": at_most(0.03), "drawn": REPORTED, "moved": at_most(0)},
        rounds=1,
        epochs=1,  # nothing in it differs from run to run
        peer="limit",
    ),
    Row(
        "list-1m",
        "scale",
        "list cached keys by prefix pages, from the index",
        "bench.rows.scale:listing",
        (Objects("listed", 64, 1_000_000),),
        (Objects("listed", 64, 50_000),),
        goals={"keys/s": at_least(200_000, "≥ 200 k/s")},
        peer="limit",
    ),
    Row(
        "rss-20g",
        "scale",
        "RSS of engine + 2 fronts while 20 GiB stream through",
        "bench.rows.scale:resident",
        (Objects("stream", 128 * MIB, 16),),
        (Objects("stream", 64 * MIB, 4),),
        goals={"MiB": at_most(400), "growth over the last three quarters": at_most(1.10, "flat")},
        rounds=1,
        epochs=10,
        cache_bytes=GIB,
        quick_cache_bytes=128 * MIB,
        peer="limit",
    ),
    Row(
        "start-2m",
        "scale",
        "start, and come back after a kill, with 2,000,000 small objects",
        "bench.rows.millions:start",
        (Objects("crowd", 100, 2_000_000),),
        (Objects("crowd", 100, 20_000),),
        goals={
            "first hit": at_most(1.0, "≤ 1 s later"),
            "first miss": at_most(3.0, "≤ 3 s later"),
            "miss after a kill": at_most(3.0, "≤ 3 s later"),
        },
        peer="empty node",
    ),
    Row(
        "evict-1m",
        "scale",
        "1,000,000 small objects leave at once, while others are read cold",
        "bench.rows.millions:evict",
        (Objects("crowd", 100, 1_000_000),),
        (Objects("crowd", 100, 20_000),),
        goals={
            "processor time / object": REPORTED,
            "cold read meanwhile": REPORTED,
            "worst cold read": at_most(1.0, "≤ 1 s"),
        },
        rounds=5,
        peer="limit",
    ),
    Row(
        "fill-delete-fill",
        "scale",
        "small objects until a volume is full, all deleted, and again",
        "bench.rows.millions:refill",
        (Objects("again", 1000, 1_000_000),),
        (Objects("again", 1000, 1_000_000),),
        goals={"objects": at_least(0.98, "as many"), "rate": REPORTED},
        cache_bytes=256 * MIB,
        quick_cache_bytes=24 * MIB,
        peer="limit",
    ),
    Row(
        "put-disk-10m",
        "write",
        "PUT 10 MiB, synced",
        "bench.rows.write:disk",
        (WRITTEN,),
        (Objects("written", 10 * MIB, 2),),
        goals={"rate": at_least(0.8), "rate / SeaweedFS": at_least(1.5)},
        connections=1,
        peer="write+fsync",
    ),
    Row(
        "put-memory-10m",
        "write",
        "PUT 10 MiB, acknowledged from memory",
        "bench.rows.write:memory",
        (WRITTEN,),
        (Objects("written", 10 * MIB, 2),),
        goals={"rate": at_least(0.7), "rate / SeaweedFS": at_least(1.5)},
        connections=1,
        peer="sink",
    ),
    Row(
        "put-disk-4k",
        "write",
        "PUT 4 KiB, synced, 16 writers",
        "bench.rows.write:small",
        (Objects("few", 4 * KIB, 1),),
        (Objects("few", 4 * KIB, 1),),
        goals={"rate": at_least(0.3), "rate / SeaweedFS": at_least(1.5)},
        connections=16,
        peer="fio",
    ),
    Row(
        "put-back",
        "write",
        "PUT 10 MiB written back, bucket at 20 ms and 50 MB/s",
        "bench.rows.write:back",
        (Objects("written", 10 * MIB, 20), Objects("written", 10 * MIB, 60)),
        (Objects("written", 10 * MIB, 3), Objects("written", 10 * MIB, 3)),
        Link(50 * MB, 0.020),
        {"acknowledged": at_least(0.95, "the same: ≥ 0.95"), "flushed / link": at_least(0.95)},
        connections=1,
        peer="unlimited",
    ),
    Row(
        "put-through-10m",
        "write",
        "PUT 10 MiB written through, 200 MB/s",
        "bench.rows.write:through",
        (WRITTEN,),
        (Objects("written", 10 * MIB, 2),),
        LAN,
        {"rate": at_least(0.95)},
        connections=1,
    ),
    Row(
        "put-through-1g",
        "write",
        "PUT 1 GiB written through, 200 MB/s",
        "bench.rows.write:through",
        (Objects("huge", GIB, 1),),
        (Objects("huge", 64 * MIB, 1),),
        LAN,
        {"rate": at_least(0.95)},
        connections=1,
        rounds=5,
    ),
    Row(
        "stream-10m",
        "client",
        "10 MiB objects into one buffer, one core, warm",
        "bench.rows.feeding:streams",
        (LARGE,),
        (Objects("large", 10 * MIB, 4),),
        goals={"TCP": at_least(0.8), "same host": at_least(0.9)},
        seconds=1.0,
        peer="limit",
    ),
    _samples("samples-members", Objects("members", 10 * KIB, 8), "members of shards", 150_000, 60_000),
    _samples("samples-objects", Objects("samples", 10 * KIB, 2000), "objects", 40_000, 30_000),
    Row(
        "tokens-4096",
        "client",
        "random windows of 4,096 tokens of a 1 GiB file, as tensors",
        "bench.rows.feeding:tokens",
        (Objects("tokens", GIB, 1),),
        (Objects("tokens-few", 64 * MIB, 1),),
        goals={"windows": at_least(0.7)},
        seconds=1.0,
        peer="limit",
    ),
    Row(
        "loader-state",
        "client",
        "a loader whose state is taken at every step of 32 samples of 10 KiB",
        "bench.rows.feeding:state",
        (Objects("samples", 10 * KIB, 2000),),
        (Objects("samples", 10 * KIB, 2000),),
        goals={"with state": at_least(0.99)},
        peer="limit",
    ),
    Row(
        "hints-half",
        "client",
        "shuffled epochs with hints, cache holds half the data",
        "bench.rows.hinted:half",
        (Objects("hinted", 256 * KIB, 2048),),
        (Objects("hinted", 256 * KIB, 192),),
        LAN,
        {"hit ratio / Belady's": at_least(0.95)},
        epochs=5,
        demand=0.5,
        cache_bytes=256 * MIB,
        quick_cache_bytes=24 * MIB,
        peer="limit",
    ),
    Row(
        "model-streamer",
        "client",
        "run:ai's model streamer loads a safetensors file of 512 MiB, warm",
        "bench.rows.streamer:load",
        (Objects("model", 512 * MIB, 1),),
        (Objects("model", 64 * MIB, 1),),
        goals={"rate / seaweedfs": at_least(1.0), "rate / nginx": at_least(0.95)},
        peer="best peer",
    ),
    _small_cache(100_000),
    _small_cache(10_000),
    *(
        _loader(objects, Link(latency_s=latency_s), decode=decode)
        for objects in (SAMPLES_100K, SAMPLES_10K)
        for latency_s, decode in ((0.0, False), (0.005, False), (0.020, False), (0.0, True), (0.020, True))
    ),
    _first_batch(0.0),
    _first_batch(0.020),
    _cold_shards(),
    _warm_rank(),
    _accelerator(
        "unet3d",
        Objects("unet3d", 146_600_628, 14),
        Objects("unet3d-few", 4_000_000, 14),
        "an accelerator k times slower than a B200 is fed batches of 7 files of 146.6 MB ± 68 MB, warm",
    ),
    _accelerator(
        "retinanet",
        Objects("retinanet", 322_957, 2_400),
        Objects("retinanet-few", 322_957, 240),
        "an accelerator k times slower than a B200 is fed batches of 24 objects of 323 KB, warm",
    ),
    Row(
        "resume",
        "resume",
        "a job killed at a random batch, resumed with other workers and ranks",
        "bench.rows.resume:rows",
        (Objects("numbered", 10_000, 640),),
        (Objects("numbered-few", 1_000, 320),),
        goals={
            "samples twice": at_most(0),
            "samples lost": at_most(0),
            "cases not exact": at_most(0),
        },
        rounds=1,  # nothing here has a spread
        epochs=1,
        peer="best peer",
    ),
    _checkpoint(
        "save",
        "a state of 1 GB is saved: stall, when it counts, memory",
        goals={
            "stall / copy": at_most(1.1),
            "stall / peer": at_most(0.5),
            "durable / write": at_most(1.2),
            "memory / cap": at_most(1.0),
        },
        peer="best peer",
    ),
    _checkpoint(
        "drain",
        "five steps of training in one thread while a save of 1 GB drains",
        link=LAN,
        goals={"steps / before": at_most(1.05)},
        peer="direct",
    ),
    _checkpoint(
        "restore",
        "a state of 1 GB is restored from a node that has it",
        goals={"reads / restore": at_least(0.8), "dcp.load / restore": REPORTED},
        peer="direct",
    ),
    _checkpoint(
        "cold",
        "a state of 1 GB is restored by a node that has nothing of it",
        link=LAN,
        goals={"reads / restore": at_least(0.9)},
        peer="direct",
    ),
    _checkpoint(
        "watchdog",
        "training goes on while a bucket takes more than a minute for a save of 1 GB",
        link=Link(14 * MB),
        goals={"stands still / watchdog": at_most(1.0)},
        peer="limit",
    ),
    _shape("shape", "8 processes save 1.05 GiB and sync, 8 others load it from the disk"),
    _shape("elsewhere", "8 processes save 1.05 GiB and sync, 8 others load it by another node of the cluster"),
    Row(
        "dcp",
        "checkpoint",
        "torch.distributed.checkpoint, 1 GB in 20 tensors, synced",
        "bench.rows.dcp:dcp",
        (STATE,),
        (STATE_QUICK,),
        goals={
            "save / torch": at_least(0.9),
            "load / torch": at_least(0.9),
            "save / s3torchconnector": at_least(1.0),
            "load / s3torchconnector": at_least(1.0),
        },
        peer="best peer",
    ),
    Row(
        "offload-plan",
        "offload",
        "plan a step of 60,000 operators and 20,000 tensors, on one core",
        "bench.rows.offloading:planning",
        goals={"a plan": at_most(20.0), "all plans, replayed": REPORTED, "memory": at_most(2048.0)},
        peer="limit",
    ),
    Row(
        "offload-shapes",
        "offload",
        "simulated: four models, 60 to 90 % of their need, disks of 4 to 96 GB/s",
        "bench.rows.offloading:shapes",
        goals={"mean": at_most(0.999, "better")},
        rounds=1,  # a replay has no spread
        epochs=1,
        peer="limit",
    ),
    Row(
        "offload-paper",
        "offload",
        "simulated: the paper's budgets, 8 to 53 % of a float32 step, at the peak of TF32 and of float32",
        "bench.rows.offload_paper:budgets",
        goals={"of ideal": REPORTED, "beside": at_most(0.999, "better")},
        rounds=1,  # a replay has no spread
        epochs=1,
        peer="limit",
    ),
    Row(
        "offload-optimum",
        "offload",
        "simulated: plans of random traces and small nets beside a bound that none can beat, and a long search",
        "bench.rows.offload_optimum:optimum",
        goals={"fluid": at_most(1.10), "search": at_most(1.02), "spread": REPORTED},
        rounds=1,  # a replay has no spread
        epochs=1,
        peer="limit",
    ),
    Row(
        "offload-engine",
        "offload",
        "training in 75 % of its need, emulated disks of 50 to 400 MB/s, and the disk as it is",
        "bench.rows.offloading:emulated",
        goals={"error": at_most(0.15), "real": REPORTED, "order": at_least(1.0)},
        peer="limit",
    ),
    Row(
        "offload-idle",
        "offload",
        "training with an engine, in a budget that all fits into",
        "bench.rows.offloading:idle",
        goals={"with the engine": at_least(0.98)},
        peer="limit",
    ),
    Row(
        "decode",
        "loader",
        "a JPEG of 124 KB becomes pixels, in one thread; the picture decoder as it ships",
        "bench.rows.decode:decoders",
        (PICTURES,),
        (PICTURES,),
        goals={"whole": REPORTED, "at least 224": REPORTED},
        rounds=11,
        peer="best peer",
    ),
    Row(
        "offload-disk",
        "offload",
        "a disk tier moves 256 MiB there and back, direct I/O, pieces of 8 MiB",
        "bench.rows.offload_disk:disk",
        goals={"write": at_least(0.8), "read": at_least(0.8)},
        rounds=11,  # a round takes seconds, and a disk that others use too is noisy
        peer="fio",
    ),
    Row(
        "checkpoint-gpu",
        "checkpoint",
        "a state of 10 GB on a GPU is saved and restored",
        "bench.gpu.checkpoint:gpu",
        (Objects("state", 10_000 * MB, 1),),
        (STATE_QUICK,),
        goals={
            "stall / copy": at_most(1.1),
            "stall / peer": at_most(0.5),
            "durable / write": at_most(1.2),
            "reads / restore": at_least(0.8),
            "peer / restore": REPORTED,
            "memory / cap": at_most(1.0),
        },
        peer="best peer",
    ),
    Row(
        "offload-gpu",
        "offload",
        "a transformer on a GPU in 90, 80, 70 and 60 % of the memory that it takes",
        "bench.gpu.offload:gpu",
        goals={
            "trained": at_least(1.0, "in all"),
            "other losses": at_most(0),
            "error": at_most(0.10),
            "of ideal": REPORTED,
        },
        rounds=1,  # the steps of each process are the samples
        epochs=1,
        peer="limit",
    ),
)

BY_NAME = {row.name: row for row in ROWS}
GROUPS = ("warm", "cold", "epoch", "scale", "write", "client", "loader", "resume", "checkpoint", "offload")
