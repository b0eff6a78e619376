"""Hosts that a test makes: network, PID, mount, UTS and IPC namespaces of their own, an sshd each.

All of a host's processes live in its PID namespace: they die with its first process, whatever they
have become. This machine lends them its programs and a few folders; it has, while they live, their
network namespaces and a folder below /tmp.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("curl", "ip", "nsenter", "unshare", "ssh", "ssh-keygen", "sshd", "rsync")
ROOT = Path(__file__).parents[2]
# An empty environment, so that no proxy or Ray of this machine is taken for the hosts'.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

SSHD_CONFIG = """\
ListenAddress {address}
HostKey {base}/host_key
AuthorizedKeysFile {base}/user_key.pub
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
"""

# Becomes process 1 of the host. What is mounted here is seen on this host only.
BOOT = """\
set -e
mount -t proc proc /proc
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd /run/outside
mount --rbind /tmp /run/outside
mount -t tmpfs tmpfs /tmp
for path in {kept}; do
    case $path in /tmp/*)
        mkdir -p $path && mount --rbind /run/outside${{path#/tmp}} $path
    esac
done
sed -E 's|^(root:.*:)[^:]*(:[^:]*)$|\\1{home}\\2|' /etc/passwd > /run/passwd
mount --bind /run/passwd /etc/passwd
mount --bind {own}/home {home}
mkdir -p {home}/.cache/pd-cluster
mount --bind {cache} {home}/.cache/pd-cluster
exec "$(command -v sshd)" -D -e -f {own}/sshd_config
"""


def why_not() -> str | None:
    """The reason for which hosts cannot be made here."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in PROGRAMS if _which(name) is None]
    return f"needs {', '.join(missing)}" if missing else None


def _which(name: str) -> str | None:
    return shutil.which(name, path=PATH)


@dataclass(frozen=True)
class Host:
    """A host that runs; `pid` is that of its first process, as this machine sees it."""

    name: str
    address: str
    namespace: str
    home: Path
    pid: int

    def command(self, script: str) -> list[str]:
        """What runs a bash script on the host, in its user's home."""
        enter = ["nsenter", "-t", str(self.pid), "--net", "--pid", "--mount", "--uts", "--ipc"]
        environment = [f"HOME={self.home}", f"PATH={PATH}", "USER=root", "LC_ALL=C.UTF-8"]
        return [*enter, "env", "-i", *environment, "bash", "-ec", f"cd\n{script}"]

    def run(self, script: str, timeout: float = 120) -> str:
        """What the script printed; an error tells all of it."""
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                self.command(script), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                ended = f"ended with {process.wait(timeout)}"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                ended = f"did not end within {timeout} s"
            output.seek(0)
            shown = output.read().decode(errors="replace")
        assert process.returncode == 0, f"{self.name}: {script}\n{ended}:\n{shown}"
        return shown

    def processes(self) -> list[str]:
        """Command lines of all that runs on the host."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and os.readlink(folder / "ns/pid") == mine:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append(line.strip())
        return [line for line in found if line]

    def bytes_received(self) -> int:
        """Bytes that came in by its cable."""
        shown = _ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth0")
        count: int = json.loads(shown)[0]["stats64"]["rx"]["bytes"]
        return count


@dataclass(frozen=True)
class Network:
    """Hosts joined by a switch. `client` is a bare network namespace."""

    hosts: tuple[Host, ...]
    client: str
    switch: str

    @contextlib.contextmanager
    def cut(self, host: Host) -> Iterator[None]:
        """The host's cable is pulled out of the switch for a while."""
        port = host.name
        _ip("-n", self.switch, "link", "set", port, "down")
        try:
            yield
        finally:
            _ip("-n", self.switch, "link", "set", port, "up")


@contextlib.contextmanager
def network(addresses: Sequence[str], client: str, cache: Path) -> Iterator[Network]:
    """Hosts at these addresses (of one /24), up and reachable by ssh with ~/.ssh/id_ed25519.

    Their home folders are at one path, each with its own content, but for ~/.cache/pd-cluster,
    which is `cache` on all of them.
    """
    tag = f"pdhosts{os.getpid()}"
    with contextlib.ExitStack() as stack:
        base = Path(tempfile.mkdtemp(prefix="pdhosts"))
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        for key in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(base / key)], check=True
            )
        switch = _namespace(stack, f"{tag}s")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        hosts = []
        for index, address in enumerate(addresses):
            name = f"host{index}"
            namespace = _namespace(stack, f"{tag}{index}")
            _plug(switch, name, namespace, address)
            hosts.append(_boot(stack, base, name, namespace, address, cache))
        _plug(switch, "client", _namespace(stack, f"{tag}c"), client)
        for host in hosts:
            _wait_for_ssh(host)
        yield Network(tuple(hosts), f"{tag}c", switch)


def _namespace(stack: contextlib.ExitStack, name: str) -> str:
    _ip("netns", "add", name)
    # With it go the interfaces in it, and their other ends.
    stack.callback(_ip, "netns", "del", name)
    _ip("-n", name, "link", "set", "lo", "up")
    return name


def _plug(switch: str, port: str, namespace: str, address: str) -> None:
    _ip("link", "add", port, "netns", switch, "type", "veth",
        "peer", "name", "eth0", "netns", namespace)  # fmt: skip
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", namespace, "link", "set", "eth0", "up")


def _boot(
    stack: contextlib.ExitStack, base: Path, name: str, namespace: str, address: str, cache: Path
) -> Host:
    home, own = base / "home", base / name
    home.mkdir(exist_ok=True)
    (own / "home" / ".ssh").mkdir(parents=True)
    shutil.copy(base / "user_key", own / "home" / ".ssh" / "id_ed25519")
    # The programs of the installed project; only its files come by `ray up`.
    (own / "home" / "pd-cluster").mkdir()
    (own / "home" / "pd-cluster" / ".venv").symlink_to(sys.prefix)
    settings = SSHD_CONFIG.format(address=address, base=base, home=home)
    (own / "sshd_config").write_text(settings)
    kept = [base, ROOT, cache, sys.prefix, sys.base_prefix]
    script = BOOT.format(
        name=name, own=own, home=home, cache=cache, kept=" ".join(shlex.quote(str(p)) for p in kept)
    )
    log = stack.enter_context((own / "log").open("wb"))
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, "unshare", "--pid", "--fork", "--kill-child", "--mount",
         "--uts", "--ipc", "bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={"PATH": PATH},
    )  # fmt: skip
    stack.callback(_end, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + 30
    while not (pids := children.read_text().split()):
        assert process.poll() is None, (own / "log").read_text()
        assert time.monotonic() < end, "unshare has started nothing"
        time.sleep(0.01)
    return Host(name, address, namespace, home, int(pids[0]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a host. Its first process is gone once all the others are, and not before."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    for pid in children:
        while _lives(pid):
            time.sleep(0.01)


def _lives(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _wait_for_ssh(host: Host) -> None:
    end = time.monotonic() + 30
    options = "-o StrictHostKeyChecking=accept-new -o BatchMode=yes -o ConnectTimeout=2"
    while True:
        done = subprocess.run(
            host.command(f"ssh {options} root@{host.address} true"),
            capture_output=True,
            check=False,
        )
        if done.returncode == 0:
            return
        assert time.monotonic() < end, f"no ssh to {host.name}: {done.stderr.decode()}"
        time.sleep(0.1)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
