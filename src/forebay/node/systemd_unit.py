"""A unit with which systemd runs a node: told when it is ready, reloaded by SIGHUP, and shut in.

Theory. The node needs little of its machine: its directory and volumes to write to, the network, nothing else. So the
unit takes the rest away. What it cannot know (where buckets that are directories lie, where the credentials of backends
are) stands in it as comments. The processes that the node starts are its own, so systemd asks only the supervisor to
stop, and gives it the time that it needs.

Invariant. Whatever stands in a path or a setting, it is one word of its line.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from forebay.core.errors import Invalid
from forebay.node.process.child import EXIT_REFUSED
from forebay.node.settings import Settings

STOP_MORE_S = 60  # to finish what clients are reading, and to close
_PRIVILEGED_PORTS = 1024

_UNIT = """\
# Made by `forebay up --systemd`. To install it:
#   forebay up --systemd ... | sudo tee /etc/systemd/system/forebay.service
{make}#   sudo systemctl daemon-reload && sudo systemctl enable --now forebay
# `systemctl reload forebay` reads identities and certificates anew; `journalctl -u forebay` shows the log.

[Unit]
Description=Forebay: a cache of disks in front of object stores
Wants=network-online.target
After=network-online.target
{mounts}
[Service]
Type=notify
User={user}
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
KillMode=mixed
TimeoutStartSec=15min
TimeoutStopSec={stop_s}
WatchdogSec=60
Restart=on-failure
RestartPreventExitStatus=2 {refused}
LimitNOFILE=1048576
LimitCORE=0
UMask=0077
# Credentials of backends, such as AWS_ACCESS_KEY_ID=..., a line each:
#EnvironmentFile=/etc/forebay/environment

NoNewPrivileges=yes
CapabilityBoundingSet={capabilities}
{ambient}ProtectSystem=strict
# Directories that are buckets and are written to belong here too:
ReadWritePaths={writes}
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""


def unit(settings: Settings, command: Sequence[str], user: str, *, make_user: bool) -> str:
    """The unit that runs `command`, a node with these settings, as `user`. `make_user`: say how that user is made.
    `Invalid` for what no unit can hold."""
    folders = [settings.dir, *settings.volumes]
    bind = settings.port < _PRIVILEGED_PORTS
    capabilities = "CAP_NET_BIND_SERVICE" if bind else ""
    home, told = shlex.quote(settings.dir), shlex.join(folders)
    make = [f"sudo useradd --system --home-dir {home} --shell /usr/sbin/nologin {user}"] if make_user else []
    make += [f"sudo install -d -m 700 -o {user} {told}"]
    return _UNIT.format(
        make="".join(f"#   {line}\n" for line in make),
        mounts=f"RequiresMountsFor={_words(folders)}\n",
        user=user,
        command=" ".join(_word(word).replace("$", "$$") for word in command),
        stop_s=int(settings.flush_timeout_s) + STOP_MORE_S,
        refused=EXIT_REFUSED,
        capabilities=capabilities,
        ambient=f"AmbientCapabilities={capabilities}\n" if bind else "",
        writes=_words(folders),
    )


def _words(texts: Iterable[str]) -> str:
    return " ".join(map(_word, texts))


def _word(text: str) -> str:
    """`text` as one word of a line."""
    if not text.isprintable():
        raise Invalid(f"{text!r} holds a control character, and a unit cannot: choose another name")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if escaped and not set(escaped) & set(" '\\\";#") else f'"{escaped}"'
