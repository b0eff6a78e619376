"""The rules of docs/architecture.md over all modules' sources: what may import what, which names
are public, and that nothing of anybody's machine is in the repository.
"""

from __future__ import annotations

import ast
import configparser
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from importlib.metadata import packages_distributions
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import pd_kernels
import pd_transfer

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "pd_cluster": ROOT / "pd_cluster",
    "pd_kernels": ROOT / "kernels" / "pd_kernels",
    "pd_transfer": ROOT / "transfer" / "pd_transfer",
}

# From the bottom: a module may import its own layer and those below. The last pattern wins.
DECIDES = 3
LAYERS = {
    "pd_cluster": 0,
    "pd_cluster.errors": 0,
    "pd_cluster.types": 0,
    "pd_cluster.states": 0,
    "pd_cluster.startup": 0,
    "pd_cluster.tombstones": 0,
    "pd_cluster.draw": 0,
    "pd_cluster.config": 0,
    "pd_cluster.registry": 0,
    "pd_cluster.cache*": 1,
    "pd_cluster.model*": 2,
    "pd_cluster.observability*": 2,
    "pd_cluster.coordinator.*": DECIDES,
    "pd_cluster.worker.*": DECIDES,
    "pd_cluster.simulate*": 4,
    "pd_cluster.worker.engine": 5,
    "pd_cluster.worker.cache": 5,
    "pd_cluster.worker.kv_feed": 5,
    "pd_cluster.worker.kv_publisher": 5,
    "pd_cluster.worker.tier_io": 5,
    "pd_cluster.worker.checksums": 5,
    "pd_cluster.worker.transfer_agent": 5,
    "pd_cluster.worker.transport": 5,
    "pd_cluster.scaling": 1,
    "pd_cluster.pools": 3,
    "pd_cluster.nodes": 6,
    "pd_cluster.mail": 5,
    "pd_cluster.peers": 6,
    "pd_cluster.observability.scrape": 7,
    "pd_cluster.worker.actor": 7,
    "pd_cluster.coordinator.actor": 7,
    "pd_cluster.gateway.*": 8,
    "pd_cluster.gateway.request": DECIDES,
    "pd_cluster.gateway.instructions": DECIDES,
    "pd_cluster.gateway.stories": DECIDES,
    # Packages whose parts have different layers; their __init__ is empty.
    "pd_cluster.worker": 0,
    "pd_cluster.coordinator": 0,
    "pd_cluster.gateway": 0,
    "pd_cluster.cluster": 9,
    "pd_cluster.serve": 10,
    "pd_cluster.chat": 10,
    "pd_cluster.operations": 10,
    "pd_cluster.scale_client": 10,
    "pd_cluster.bench*": 11,
    "pd_cluster.cli*": 12,
    "pd_cluster.__main__": 13,
}

# Events go in, instructions come out. These, and all that they import of the project. A new module
# of these packages is pure until it is named among the shells.
PURE = (
    "pd_cluster.cache.*",
    "pd_cluster.coordinator.*",
    "pd_cluster.worker.*",
    "pd_cluster.gateway.request",
    "pd_cluster.gateway.instructions",
    "pd_cluster.states",
    "pd_cluster.tombstones",
    "pd_cluster.types",
)
SHELLS = (
    "pd_cluster.cache.storage_*",  # files and sockets behind cache/storage.py's interface
    "pd_cluster.coordinator.actor",
    "pd_cluster.worker.actor",
    "pd_cluster.worker.cache",
    "pd_cluster.worker.engine",
    "pd_cluster.worker.kv_publisher",
    "pd_cluster.worker.tier_io",
    "pd_cluster.worker.checksums",
    "pd_cluster.worker.transfer_agent",
    "pd_cluster.worker.transport",
)
IMPURE = {
    *("asyncio", "concurrent", "contextvars", "multiprocessing", "queue", "sched", "threading"),
    *("datetime", "time"),
    *("http", "select", "selectors", "signal", "socket", "socketserver", "ssl", "subprocess"),
    *("secrets", "uuid"),
    *(
        "aiohttp",
        "fastapi",
        "httpx",
        "httpx2",
        "ray",
        "redis",
        "starlette",
        "torch",
        "ucxx",
        "uvicorn",
    ),
    *("pd_kernels", "pd_transfer"),
}
# A layout allocates tensors and hands out views of them.
PURE_WITH = {"pd_cluster.cache.layout": {"torch"}}


def module_paths() -> dict[str, Path]:
    paths = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            paths[name] = path
    return paths


MODULES = module_paths()


def imports(name: str) -> Iterator[tuple[str, int]]:
    """Dotted names and lines: also within functions and under TYPE_CHECKING."""
    path = MODULES[name]
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                # Of a package one imports a module, or a name that its __init__ has.
                yield (full if full in MODULES else node.module), node.lineno


def own_imports(name: str) -> Iterator[tuple[str, int]]:
    return ((target, line) for target, line in imports(name) if target in MODULES)


def layer(name: str) -> int | None:
    found = None
    for pattern, number in LAYERS.items():
        if fnmatchcase(name, pattern):
            found = number
    return found


def is_pure(name: str) -> bool:
    pure, shell = (any(fnmatchcase(name, each) for each in group) for group in (PURE, SHELLS))
    return pure and not shell


def reachable(names: Iterable[str]) -> set[str]:
    """These modules and all of the project that importing them brings, or may bring later."""
    todo = list(names)
    seen = set(todo)
    while todo:
        new = {target for target, _ in own_imports(todo.pop())} - seen
        seen |= new
        todo += new
    return seen


def where(name: str, line: int) -> str:
    return f"{MODULES[name].relative_to(ROOT)}:{line}"


def test_imports_go_down_the_layers() -> None:
    wrong = []
    for name in MODULES:
        mine = layer(name)
        if not name.startswith("pd_cluster"):
            continue
        if mine is None:
            wrong.append(f"{name} has no layer: say in LAYERS what it may import")
            continue
        for target, line in own_imports(name):
            theirs = layer(target)
            if target.startswith("pd_cluster") and theirs is not None and theirs > mine:
                wrong.append(f"{where(name, line)}: {name} imports {target}, which is above it")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["pd_kernels", "pd_transfer"])
def test_libraries_stand_alone(package: str) -> None:
    others = PACKAGES.keys() - {package}
    wrong = [
        f"{where(name, line)}: {target}"
        for name in MODULES
        if name.split(".")[0] == package
        for target, line in imports(name)
        if target.split(".")[0] in others
    ]
    assert not wrong, "\n".join(wrong)


def test_deciding_parts_of_different_actors_do_not_know_each_other() -> None:
    wrong = [
        f"{where(name, line)}: {name} imports {target}"
        for name in MODULES
        if layer(name) == DECIDES
        for target, line in own_imports(name)
        if layer(target) == DECIDES and name.split(".")[1] != target.split(".")[1]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_circles() -> None:
    graph = {name: {target for target, _ in own_imports(name)} for name in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_pure_modules_import_nothing_impure() -> None:
    pure = [name for name in MODULES if is_pure(name)]
    assert len(pure) >= len(PURE)
    wrong = [
        f"{where(name, line)}: {target}"
        for name in reachable(pure)
        for target, line in imports(name)
        if target.split(".")[0] in IMPURE - PURE_WITH.get(name, set())
    ]
    assert not wrong, "pure modules, or what they import:\n" + "\n".join(sorted(wrong))


def test_the_simulator_runs_the_deciding_parts_and_nothing_else() -> None:
    simulate = [name for name in MODULES if name.startswith("pd_cluster.simulate")]
    parts = reachable(simulate)
    assert not [name for name in parts if any(fnmatchcase(name, each) for each in SHELLS)]
    assert not [name for name in parts if name.startswith(("pd_transfer", "pd_cluster.peers"))]
    libraries = {target.split(".")[0] for name in parts for target, _ in imports(name)}
    assert not libraries & {"ray", "ucxx", "fastapi", "asyncio"}
    if simulate:
        assert {"pd_cluster.worker.scheduler", "pd_cluster.coordinator.state"} <= parts


def test_importing_pure_modules_brings_no_heavy_library() -> None:
    """The rule above in practice, for what comes in by ways that the sources do not show."""
    light = [name for name in MODULES if is_pure(name) and name not in PURE_WITH]
    heavy = ("ray", "torch", "fastapi", "ucxx", "transformers")
    code = f"import sys, {', '.join(light)}; print(*[x for x in {heavy} if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# Part of another library's own interface, which cannot do without it.
BROUGHT_BY = {
    "pydantic_core": "pydantic",
    "starlette": "fastapi",
    "tokenizers": "transformers",
}
# Imported only where their feature is asked for: an extra may bring what they need.
OPTIONAL = (
    "pd_cluster.cache.storage_*",
    "pd_cluster.observability.dashboards*",
    "pd_cluster.simulate.plot",
    "pd_kernels.triton_kernels.*",
    "pd_transfer.upstream",
    "pd_transfer.bench_node",
)


def declared(*, extras: bool) -> set[str]:
    """Normalised names of the distributions that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    if extras:
        wanted += [each for extra in project["optional-dependencies"].values() for each in extra]
    return {normalised(re.split(r"[<>=!~\[; ]", each)[0]) for each in wanted}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_library_is_a_declared_dependency() -> None:
    """What only some other package happens to bring is missing in another environment."""
    providers = packages_distributions()
    core, all_declared = declared(extras=False), declared(extras=True)
    wrong = []
    for name in MODULES:
        allowed = all_declared if any(fnmatchcase(name, each) for each in OPTIONAL) else core
        for target, line in sorted(set(imports(name))):
            top = target.split(".")[0]
            if top in sys.stdlib_module_names or top in PACKAGES:
                continue
            found = {normalised(each) for each in providers.get(BROUGHT_BY.get(top, top), [top])}
            if not found & allowed:
                wrong.append(f"{where(name, line)}: {top} ({', '.join(sorted(found))})")
    assert not wrong, "\n".join(wrong)


def test_public_names_of_the_kernels() -> None:
    assert sorted(pd_kernels.__all__) == [
        "AttentionHeads",
        "CapturedAttention",
        "PackedLinear",
        "PageTables",
        "PagedAttention",
        "StepAttention",
        "backend_name",
        "decode_attention",
        "decode_attention_reference",
        "filter_probabilities",
        "filter_probabilities_reference",
        "fused_add_rms_norm",
        "fused_add_rms_norm_reference",
        "linear_reference",
        "page_gather",
        "page_gather_reference",
        "page_scatter",
        "page_scatter_reference",
        "page_write",
        "page_write_reference",
        "paged_attention",
        "prefill_attention",
        "prefill_attention_reference",
        "rms_norm",
        "rms_norm_reference",
        "rope",
        "rope_cos_sin",
        "rope_frequencies",
        "rope_reference",
        "silu_and_mul",
        "silu_and_mul_reference",
        "warm_up",
    ]
    assert all(hasattr(pd_kernels, name) for name in pd_kernels.__all__)


def test_public_names_of_the_transfer_library() -> None:
    assert sorted(pd_transfer.__all__) == [
        "BLK_SEG",
        "DEFAULT_COMM_PORT",
        "DRAM_SEG",
        "Event",
        "FILE_SEG",
        "FakeNetwork",
        "HAVE_UCX_GPU_DEVICE_API",
        "NIXL_INIT_AGENT",
        "NIXL_READ",
        "NIXL_WRITE",
        "OBJ_SEG",
        "PeerState",
        "Statistics",
        "VRAM_SEG",
        "agent",
        "nixlBackendError",
        "nixlCancelledError",
        "nixlInvalidParamError",
        "nixlMismatchError",
        "nixlNoTelemetryError",
        "nixlNotAllowedError",
        "nixlNotFoundError",
        "nixlNotPostedError",
        "nixlNotSupportedError",
        "nixlRegDList",
        "nixlRemoteDList",
        "nixlRemoteDisconnectError",
        "nixlRepostActiveError",
        "nixlUnknownError",
        "nixlXferDList",
        "nixlXferTelemetry",
        "nixl_agent",
        "nixl_agent_config",
        "nixl_backend_handle",
        "nixl_mem_t",
        "nixl_prepped_dlist_handle",
        "nixl_status_t",
        "nixl_thread_sync_t",
        "nixl_xfer_handle",
        "nixl_xfer_op_t",
    ]
    assert all(hasattr(pd_transfer, name) for name in pd_transfer.__all__)


# --- nothing of a machine ---


def repository_files() -> list[Path]:
    """What git has, and what it would take: new files are checked before they are added."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.decode().split("\0") if name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def index_hosts() -> set[str]:
    """Hosts of the package indexes that this machine is set to use, the public ones left out."""
    urls = [os.environ.get(f"{tool}_{kind}", "") for tool in ("PIP", "UV") for kind in INDEX_KEYS]
    folders = [Path("/etc"), Path.home() / ".config" / "pip", Path.home() / ".pip"]
    for folder in folders:
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(folder / "pip.conf")
        for section in parser.sections():
            urls += [value for key, value in parser.items(section) if key.endswith("url")]
    hosts = {urlsplit(url).hostname or "" for text in urls for url in text.split()}
    return hosts - {"", "pypi.org", "download.pytorch.org", "localhost", "127.0.0.1"}


INDEX_KEYS = ("INDEX_URL", "EXTRA_INDEX_URL", "DEFAULT_INDEX")
# A home directory or a workspace of one machine; an option that binds installs to one index.
MACHINE = re.compile(r"(?<![\w.$}~-])/(home|Users|root|work|workspace|mnt)/\w|index[-_]url\b")


def test_no_machine_in_the_repository() -> None:
    hosts = index_hosts()
    wrong = []
    for path in repository_files():
        text = path.read_bytes().decode(errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if str(ROOT) in line or MACHINE.search(line) or any(host in line for host in hosts):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not wrong, "\n".join(wrong)
