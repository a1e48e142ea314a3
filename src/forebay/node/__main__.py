"""`python -m forebay.node`: a node in the foreground, with `forebay node`'s flags and nothing else imported."""

from __future__ import annotations

import argparse
import sys

from forebay.core.errors import ForebayError
from forebay.node.process.app import run
from forebay.node.settings import load


def main(arguments: list[str]) -> int:
    """Parse flags, run, and turn an error into a message and a status."""
    parser = argparse.ArgumentParser(prog="python -m forebay.node", description="Run a Forebay node.")
    parser.add_argument("--dir", help="the node's directory")
    parser.add_argument("--listen", help="HOST:PORT; port 0 takes any free one and prints it")
    parser.add_argument("--fronts", type=int, help="front processes; 0 runs all in one process")
    parser.add_argument("--capacity", help="what all volumes together may hold, such as 100GiB")
    parser.add_argument("--volume", action="append", dest="volumes", help="a disk's directory; may be repeated")
    parser.add_argument("--config", help="a TOML file with the same names")
    parser.add_argument("--identities", help="a file of identities; needed to listen beyond loopback")
    parser.add_argument("--identity-key", help="the file that opens sealed secrets of the identities")
    parser.add_argument("--tls-cert", help="a certificate, with its chain, as PEM: the node speaks TLS")
    parser.add_argument("--tls-key", help="its private key as PEM; default: in the same file")
    parser.add_argument("--domain", help="suffix of virtual-host bucket names")
    parser.add_argument("--allow-backend", action="append", dest="allow_backends", help="a pattern; may be repeated")
    parser.add_argument("--no-auto-buckets", action="store_const", const=False, dest="auto_buckets")
    parser.add_argument(
        "--flush-timeout", type=float, help="seconds that a stop may take to flush; 0 leaves it for the next start"
    )
    parser.add_argument(
        "--loosen", action="store_const", const=True, help="let in who was not let in at the last start"
    )
    parser.add_argument("--cluster", help="be one of many nodes: etcd://HOST:PORT,HOST:PORT/NAME")
    parser.add_argument("--advertise", help="HOST:PORT where other nodes reach this one")
    parser.add_argument("--cluster-ca", help="who vouches for etcd's members, as PEM: use TLS")
    parser.add_argument("--cluster-cert", help="the certificate to show to etcd, as PEM")
    parser.add_argument("--cluster-key", help="its private key as PEM; default: in the same file")
    parser.add_argument("--cluster-user", help="etcd's user")
    parser.add_argument("--cluster-password-file", help="the user's password; default: FOREBAY_CLUSTER_PASSWORD")
    parser.add_argument("--peer-key", help="a secret by which nodes of a cluster know each other")
    parser.add_argument("--peer-ca", help="who vouches for the other nodes' certificates, as PEM")
    parser.add_argument("--log-to-file", action="store_const", const=True, help="log to DIR/log/node.log")
    parser.add_argument("--audit", help="what the audit log tells of: off (the default), changes or reads")
    parser.add_argument("--log-format", help="lines of text (the default) or json")
    flags = vars(parser.parse_args(arguments))
    try:
        return run(load(flags.pop("config"), **flags))
    except ForebayError as error:
        print(f"forebay: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
