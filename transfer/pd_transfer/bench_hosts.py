"""Two hosts on one machine for the bench: network namespaces, joined by a virtual cable alone.

Needs iproute2 and root, and Linux. Each has its own loopback, and sees nothing of the other but
what crosses the cable.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

ADDRESSES: Final = ("10.79.0.1", "10.79.0.2")


class NoNamespaces(Exception):
    """There can be none here; says why."""


def ip(*arguments: str) -> None:
    """
    Raises:
        subprocess.CalledProcessError: it failed.
    """
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def namespaces(*names: str) -> Iterator[None]:
    """Network namespaces of these names, gone afterwards with all that is in them.

    Raises:
        NoNamespaces
    """
    if shutil.which("ip") is None:
        raise NoNamespaces("network namespaces need iproute2")
    if os.geteuid() != 0:
        raise NoNamespaces("network namespaces need root")
    with ExitStack() as stack:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                raise NoNamespaces(
                    f"no network namespaces here: {error.stderr.decode().strip()}"
                ) from error
            stack.callback(ip, "netns", "del", name)
        yield


@contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Prefixes of commands that are to run on either host; `ADDRESSES` are theirs.

    Raises:
        NoNamespaces
    """
    names = [f"pdt{os.getpid()}{side}" for side in "ab"]
    ends = [f"v{os.getpid()}{side}" for side in "ab"]
    with namespaces(*names):
        ip("link", "add", ends[0], "netns", names[0], "type", "veth",
           "peer", "name", ends[1], "netns", names[1])  # fmt: skip
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        first, second = (["ip", "netns", "exec", name] for name in names)
        yield first, second
