"""All limits, each with its reason and its relation to the others.

Theory. An input without a limit will cause an outage, and limits scattered over the code contradict each other. So all
limits are plain numbers here, with the reason beside each. Importing this module asserts the relations between them. A
module that needs a limit imports it from here, and no test changes one.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# --- store -----------------------------------------------------------------------------------------------------------
BLOCK_BYTES = 4 * MIB  # unit of fetch, presence and checksum: one round trip of 20 ms costs 10 % at 200 MB/s
STRIPE_BYTES = 16 * MIB  # unit of placement over nodes: what opens an object is one of them; samples and most files are
RELAY_BYTES_MIN = 1 * MIB  # of a read that a node relays and does not keep: the engine's part costs 0.5 MB of bytes
INLINE_BYTES_MAX = 16 * KIB  # at most this lives in the index record: below it a file costs more than its bytes
OBJECT_BYTES_MAX = 50 * 1024 * GIB  # S3's limit on one object since 2025: 50 TB; a bitmap of 1.6 MB at 4 MiB blocks
KEY_BYTES_MAX = 1024  # S3's limit on a key, in UTF-8 bytes
INDEX_KEY_BYTES_MAX = 511  # LMDB's compiled limit on a key
BUCKET_NAME_BYTES_MAX = 63  # S3's rule; also keeps virtual-host names inside one DNS label
VOLUMES_MAX = 64  # disks in one node: the largest chassis sold hold about 60 NVMe drives
INDEX_MAP_BYTES = 64 * GIB  # address space of one index, not disk space; grows by itself when full
DURABLE_MAP_BYTES = 8 * GIB  # the same of the synced index; it holds what is owed, and bucket contents that are local
INDEX_READERS_MAX = 1024  # read transactions at once on one index: fronts x threads, with room for dead ones
FILE_HEADER_BYTES_MAX = 3584  # of a data file's header in an xattr: ext4 gives all xattrs of a file 4 KiB less overhead
RESERVE_BYTES_MAX = 256 * MIB  # left free on a volume's filesystem (1 % of it if that is less): the index must grow

# --- writing ---------------------------------------------------------------------------------------------------------
PUT_BYTES_MAX = 5 * GIB  # S3's limit on one PutObject, part or copy; larger objects are multipart uploads
ETAG_MD5_BYTES_MAX = 256 * KIB  # up to here an MD5 is cheap beside the write (0.4 ms), and clients compare it
PART_BYTES_MIN = 5 * MIB  # S3's least size of a part but the last
PARTS_MAX = 10_000  # S3's limit on parts of an upload
UPLOADS_MAX = 10_000  # open uploads per bucket: each holds files that nobody may ever complete
UPLOAD_AGE_MAX_S = 7 * 86400.0  # an open upload older than this is aborted: the vendor advises a rule of a week
STREAM_BYTES_MIN = 4 * MIB  # a body at least this long goes to the backend while it is received (write-through)
MULTIPART_BYTES_MIN = (
    64 * MIB
)  # a flush at least this long is a multipart upload: what a crash must send again is a part
FLUSH_PART_BYTES = 32 * MIB  # a part of a flush, or more where PARTS_MAX would be exceeded
FLUSHES_MAX = 16  # flushes at once per bucket
UNANSWERED_MAX = 64  # bodies of a key whose puts were not answered: beyond, the backend is asked before one more leaves
LATE_S = 960.0  # how long after its answer was lost a put may land: the longest a proxy holds one is 15 minutes
DIRTY_WAIT_S = 10.0  # how long a write waits for dirty bytes to go down before it is refused
METADATA_BYTES_MAX = 2 * KIB  # S3's limit on user metadata of an object, names and values
TAGS_MAX = 10  # S3's limit on tags of an object
TAG_KEY_CHARS_MAX = 128  # S3's limit on a tag's key
TAG_VALUE_CHARS_MAX = 256  # S3's limit on a tag's value
CORS_RULES_MAX = 100  # S3's limit on the CORS rules of a bucket: every front holds them all
SETTING_BYTES_MAX = 64 * KIB  # S3's limit on a CORS configuration's XML; ACLs and tags are shorter
FORM_BYTES_MAX = 20 * KIB  # S3's limit on a form upload's fields, everything but the file
DELETE_KEYS_MAX = 1000  # S3's limit on keys in one DeleteObjects
CLOCK_SKEW_MAX_S = 900.0  # S3's limit on the age of a signature

# --- HTTP ------------------------------------------------------------------------------------------------------------
REQUEST_LINE_BYTES_MAX = 16 * KIB  # a 1,024-byte key takes 3 KiB percent-encoded, a presigned query 2 KiB; nginx: 8 KiB
HEADER_BYTES_MAX = 32 * KIB  # all headers of a request together; nginx: 4 x 8 KiB, AWS: 8 KiB of user metadata at most
HEADERS_MAX = 128  # header count; Node.js: 2000 by default, Apache: 100
XML_BODY_BYTES_MAX = 2 * MIB  # CompleteMultipartUpload with 10,000 parts is about 1.2 MB
COMPLETION_BODY_BYTES_MAX = 2 * MIB  # the same in JSON with the longest checksums is about 1.5 MB
JSON_BODY_BYTES_MAX = 1 * MIB  # other native requests name things; none needs more
HEADER_TIMEOUT_S = 15.0  # from the first byte of a request to its last header byte: slow-loris ends here
IDLE_TIMEOUT_S = 75.0  # keep-alive without a request: nginx's keepalive_timeout
STALL_TIMEOUT_S = 60.0  # a client that reads nothing for this long is gone: nginx's send_timeout
CONNECTIONS_MAX = 4096  # per front; each costs two descriptors and about 2 KiB of Python
ADDRESS_SHARE = 0.5  # of them for one address: it cannot take them all; settable, since a balancer's is everybody's
ACCOUNTS_MAX = 1024  # identities with limits that fronts count together until a restart; each costs 2 KiB if used
FRONTS_MAX = 256  # front processes of a node: more than a machine has cores for
UNPROVED_BYTES_MAX = 64 * MIB  # per front, for heads and bodies of clients that have not shown who they are
JWT_BYTES_MAX = 16 * KIB  # a bearer's token; those with hundreds of groups have 10 KiB. AWS takes 20,000 characters
WEB_IDENTITY_BODY_BYTES_MAX = 2 * JWT_BYTES_MAX  # a form with such a token, and names of at most 2 KiB
ISSUER_ANSWER_BYTES_MAX = 256 * KIB  # an issuer's description, or its keys: they have 1 to 20 KiB
STRAY_BODY_BYTES_MAX = 16 * KIB  # a body where none has a meaning (a GET's): read, so that the connection can go on
CHUNK_FRAMING_BYTES_MAX = (
    256 * KIB
)  # how much longer than its bytes a body's framing may be: chunks of 2 bytes are work
PIPELINE_MAX = 32  # requests waiting on one connection before reading from it pauses
LIST_KEYS_MAX = 1000  # S3's page size

# --- node ------------------------------------------------------------------------------------------------------------
FRAME_BYTES_MAX = 16 * MIB  # one message between engine and front: a listing page of 1,000 keys is under 2 MiB
FRONT_FILES_OPEN_MAX = 512  # data files a front keeps open between requests
PASS_BYTES_MAX = 256 * MIB  # memory for bytes in flight that no disk takes (pass-through), over all reads
PASS_UNIT_BYTES = 512 * KIB  # what of it is claimed at a time: 512 slow readers, and each has some
PASS_AHEAD_BYTES_MAX = 128 * MIB  # of it, for bytes that nobody waits for yet: 256 readers who wait find some at once
READ_WINDOW_BYTES = 64 * MIB  # how far fetching may run ahead of one reader: 0.3 s at 200 MB/s, hides 20 ms latency
FETCHES_MAX = 64  # backend requests at once per bucket; S3 clients of the vendor default to 10-50
FETCHES_AHEAD_MAX = 48  # of those, for bytes that nobody waits for yet: who waits finds a free one at once
FETCHES_PER_READ_MAX = 8  # parallel ranges for one reader: binds when a connection is slower than the link
TOUCHES_MAX = 4096  # hits a front may hold before it must report them to the engine

# --- cluster state ---------------------------------------------------------------------------------------------------
META_CHANGES_MAX = 128  # changes and conditions of one transaction: etcd's default (--max-txn-ops)
META_ANSWER_BYTES_MAX = 64 * MIB  # of one answer or event: the state is kilobytes; etcd's own limit on a request is 1.5
MANIFEST_BYTES_MAX = 4 * MIB  # what a cluster leaves in a bucket: one request; names of some 50,000 objects
WARM_OBJECTS_MAX = 50_000  # of them: large objects, or shards, of hundreds of terabytes
SHARED_BUCKET_BYTES_MAX = 512 * KIB  # settings of a bucket of a cluster: a request, with its secrets sealed
SHARED_BUCKETS_BYTES_MAX = 32 * MIB  # of all of them: a listing is one answer, and in base64
META_PATIENCE_S = 5.0  # how long a call may take: etcd elects a leader in 1 to 2 s by default

# --- backend ---------------------------------------------------------------------------------------------------------
BACKEND_ATTEMPTS_MAX = 5  # AWS SDK's default is 3 to 5 ("standard" retry mode: 3)
BACKEND_CONNECT_TIMEOUT_S = 5.0
RETRY_AFTER_MAX_S = 24 * 3600.0  # what a backend may ask for; more is a mistake of its clock
BACKEND_STALL_TIMEOUT_S = 30.0  # no byte for this long: the request is retried from where it stopped

# --- client ----------------------------------------------------------------------------------------------------------
CLIENT_CONNECT_TIMEOUT_S = 5.0  # a node is on this host or in this rack: three SYN retransmissions
CLIENT_STALL_TIMEOUT_S = 180.0  # longer than the node's own patience with its backend, so that the node says why first
CLIENT_IDLE_CONNECTIONS_MAX = 16  # kept per client for reuse: one per thread that commonly reads at once
CLIENT_LANE_STRIPES = 2  # of one owner at once, where order does not matter: one comes while the next is asked for
CLIENT_LANES_MAX = 16  # threads of such a read
CLIENT_STRIPES_MAX = 8  # of a large object that one read fetches at once: 128 MiB of memory where they must be in order
CLIENT_FILES_OPEN_MAX = 256  # descriptors of objects that a client keeps: a quarter of the usual limit of a process
CLIENT_FILE_IDLE_S = 30.0  # an unused descriptor holds an evicted object's space: not longer than this

# --- batches, shards, hints ------------------------------------------------------------------------------------------
BATCH_ITEMS_MAX = 16_384  # items of one batch: more gain nothing, and the answer's plan is held in memory
BATCH_BODY_BYTES_MAX = 4 * MIB  # a batch request: 16,384 items of 250 bytes
BATCH_BYTES_MAX = 4 * GIB  # an answer: over this a connection is held for minutes, ask in parts
BATCH_COLD_AHEAD = 32  # cold items of one batch that are asked of the engine at once
DOOR_FILES_MAX = 64  # descriptors in one message of the door; the kernel takes 253
DOOR_ASKS_MAX = 4  # questions at one door connection that are not answered yet: hides the way, bounds the memory
DOOR_ASK_BYTES_MAX = 128 * KIB  # one message to the door: DOOR_FILES_MAX of the longest keys are 70 KiB
DOOR_ANSWER_BYTES_MAX = 2 * MIB  # one message from it: DOOR_FILES_MAX inline objects are 1 MiB
DOOR_CONNECTIONS_MAX = 1024  # per front; a process of a job opens one
DOOR_GIVEN_MAX = 512  # descriptors that one connection may hold: twice what a client keeps, threads may overlap
MEMBERS_MAX = 4_000_000  # of one shard: an index of about 200 MB in memory while it is built
MEMBER_INFLATED_BYTES_MAX = 1 * GIB  # a deflated zip member, or a bomb
PLAIN_RATIO_MAX = 200  # how many times its size a compressed shard may unpack to, or it is a bomb; text has 20
PLAIN_FREE_BYTES = 1 * GIB  # up to here any ratio will do: small bombs do no harm
LISTING_OBJECTS_MAX = 50_000_000  # of one listing: 3 GB; datasets of more objects are sharded
LISTING_PART_BYTES_MAX = 4 * MIB  # of a listing that the store had no room for, in one message
HINT_TTL_S = 600.0  # how long hints outlive the last word of their job: a restart should find them
HINT_ACCESSES_MAX = 4_000_000  # known future of one job: 100 MB in the engine

assert BLOCK_BYTES % (4 * KIB) == 0, "a punched hole must be page aligned"
assert STRIPE_BYTES % BLOCK_BYTES == 0
assert INLINE_BYTES_MAX < BLOCK_BYTES
assert KEY_BYTES_MAX * 3 < REQUEST_LINE_BYTES_MAX < HEADER_BYTES_MAX
assert JWT_BYTES_MAX < HEADER_BYTES_MAX
assert JWT_BYTES_MAX < WEB_IDENTITY_BODY_BYTES_MAX < UNPROVED_BYTES_MAX
assert STRAY_BODY_BYTES_MAX + HEADER_BYTES_MAX < UNPROVED_BYTES_MAX < PASS_BYTES_MAX
assert READ_WINDOW_BYTES >= 2 * BLOCK_BYTES
assert PASS_BYTES_MAX >= READ_WINDOW_BYTES + BLOCK_BYTES
assert BLOCK_BYTES % PASS_UNIT_BYTES == PASS_AHEAD_BYTES_MAX % PASS_UNIT_BYTES == PASS_BYTES_MAX % PASS_UNIT_BYTES == 0
assert PASS_AHEAD_BYTES_MAX < PASS_BYTES_MAX
assert FETCHES_PER_READ_MAX <= FETCHES_AHEAD_MAX < FETCHES_MAX
assert PART_BYTES_MIN <= FLUSH_PART_BYTES <= MULTIPART_BYTES_MIN <= PUT_BYTES_MAX
assert BATCH_BODY_BYTES_MAX < FRAME_BYTES_MAX
assert 2 * MANIFEST_BYTES_MAX <= FRAME_BYTES_MAX
assert DOOR_FILES_MAX < CLIENT_FILES_OPEN_MAX <= FRONT_FILES_OPEN_MAX
assert DOOR_FILES_MAX * (KEY_BYTES_MAX + BUCKET_NAME_BYTES_MAX + 16) < DOOR_ASK_BYTES_MAX
assert DOOR_FILES_MAX * 2 * INLINE_BYTES_MAX <= DOOR_ANSWER_BYTES_MAX
assert CLIENT_FILES_OPEN_MAX * 2 <= DOOR_GIVEN_MAX
assert CLIENT_STALL_TIMEOUT_S > BACKEND_ATTEMPTS_MAX * BACKEND_STALL_TIMEOUT_S
