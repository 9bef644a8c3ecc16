"""Which folder may import what, checked in the source: the arrows of docs/architecture.md."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("protocol", "workers", "driver", "launch")
ANYTHING = frozenset({"*"})
TORCH = frozenset({"torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "numpy"})


class Rule(NamedTuple):
    """What the files under a path may import; the rule with the longest matching path applies."""

    inside: tuple[str, ...]  # of this package
    outside: frozenset[str]  # besides the standard library


EVERY_WORKER = ("workers/process", "workers/importing")
RULES = {
    "protocol": Rule(("protocol",), frozenset({"msgpack", "numpy"})),
    "protocol/channels.py": Rule(("protocol",), frozenset({"zmq"})),
    "protocol/connection.py": Rule(("protocol",), frozenset({"zmq"})),
    "protocol/curve.py": Rule(("protocol",), frozenset({"zmq"})),
    "workers/__init__.py": Rule((), frozenset()),
    "workers/process.py": Rule(("protocol",), frozenset()),
    "workers/importing.py": Rule((), frozenset()),
    "workers/clone.py": Rule((), frozenset()),
    "workers/fork_server.py": Rule(("protocol", "workers/clone", "workers/importing"), frozenset()),
    "workers/prepare": Rule(
        ("protocol", *EVERY_WORKER, "workers/prepare"), frozenset({"numpy", "tokenizers", "jinja2"})
    ),
    "workers/prepare/grammar_process.py": Rule(("protocol", "workers/process"), frozenset({"llguidance"})),
    "workers/summarize": Rule(("protocol", *EVERY_WORKER, "workers/summarize"), frozenset({"numpy", "tokenizers"})),
    "workers/execute": Rule(("protocol", *EVERY_WORKER, "workers/execute"), frozenset({"numpy"})),
    "workers/execute/scheduling": Rule(("protocol", "workers/execute/scheduling"), frozenset({"numpy"})),
    "workers/execute/grammar": Rule(("protocol", "workers/execute"), frozenset({"numpy", "llguidance"})),
    "workers/execute/model": Rule(("protocol", "workers/importing", "workers/execute"), TORCH),
    "workers/execute/model/spec": Rule(
        ("protocol", "workers/execute/kernels/memory", "workers/execute/model/spec"), TORCH
    ),
    "workers/execute/model/parallel/orders.py": Rule(("protocol", "workers/execute"), frozenset({"numpy", "msgpack"})),
    "workers/execute/model/parallel/ranks.py": Rule(("protocol", "workers/execute"), TORCH | {"msgpack"}),
    "workers/execute/model/parallel/follow.py": Rule(("protocol", "workers/execute"), TORCH | {"msgpack"}),
    "workers/execute/model/checkpoint/gguf": Rule(("protocol", "workers/execute"), TORCH | {"gguf"}),
    "workers/execute/attention": Rule(("protocol", "workers/execute"), TORCH),
    "workers/execute/sampling": Rule(("protocol", "workers/execute"), TORCH),
    "workers/execute/kernels": Rule(("protocol", "workers/execute"), TORCH | {"triton"}),
    "driver": Rule(("protocol", "driver"), frozenset({"numpy"})),
    "launch": Rule(("protocol", "driver", "launch"), ANYTHING),
    # Without a model and without a process: the scheduler itself, which is pure.
    "launch/replay": Rule(("protocol", "launch", "workers/execute/scheduling"), ANYTHING),
}
# Decisions that can be fuzzed in microseconds depend on their arguments only.
IMPURE = frozenset(
    {"os", "io", "time", "datetime", "random", "secrets", "socket", "threading", "subprocess", "asyncio"}
)
RUNS_WHAT_IT_IS_GIVEN = frozenset(
    {
        "eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load",
        "os.system", "os.popen",
    }
)  # fmt: skip
# Modules through which workers, driver or protocol could open network connections.
OUTBOUND = frozenset({"socket", "urllib", "http", "ftplib", "smtplib", "requests", "httpx", "aiohttp", "websockets"})
# The only uses of plain sockets.
PLAIN_SOCKETS = {
    ROOT / "driver" / "control.py": {"socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)"},  # a file
    ROOT / "driver" / "fork_servers.py": {
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
        "socket.send_fds(self.channel, [FORK], [*files, theirs.fileno(), file.fileno()])",
    },
    ROOT / "protocol" / "unfinished.py": {"socket.fromfd(file, socket.AF_INET, socket.SOCK_STREAM)"},  # an open one
    ROOT / "workers" / "fork_server.py": {  # inherited
        "socket.socket(fileno=0)", "socket.socket(fileno=answer)", "socket.recv_fds(channel, len(FORK), _NUM_FILES)",
    },
}  # fmt: skip
EVERYWHERE = ("tcp://*", "0.0.0.0", "[::]", "ipc://@")
CODE_FROM_DATA = frozenset({"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"})


class Import(NamedTuple):
    where: str  # file:line
    name: str  # "zmq", or a path in this package such as "protocol/codec"
    is_inside: bool


def sources(folder: str = "") -> list[Path]:
    folders = [ROOT / folder] if folder else [*(ROOT / name for name in FOLDERS), ROOT / "triptych" / "__init__.py"]
    found = [path for base in folders for path in ([base] if base.suffix else sorted(base.rglob("*.py")))]
    return [path for path in found if "__pycache__" not in path.parts]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The syntax tree of a file, which every rule visits."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))


@cache
def imports(path: Path) -> list[Import]:
    """Every import of a file, wherever it is."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    for node in nodes(path):
        where = f"{relative(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Import(where, alias.name.partition(".")[0], False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield Import(where, (node.module or "").partition(".")[0], False)
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1]
            target = base.joinpath(*(node.module or "").split(".")) if node.module else base
            names = [target] if node.module else [target / alias.name for alias in node.names]
            yield from (Import(where, relative(name), True) for name in names)


def rule_of(path: Path) -> Rule:
    name = relative(path)
    return RULES[max((prefix for prefix in RULES if f"{name}/".startswith(f"{prefix}/")), key=len)]


def is_allowed(item: Import, rule: Rule) -> bool:
    if item.is_inside:
        names = [*rule.inside, "__version__"]
        return any(f"{item.name}/".startswith(f"{name}/") for name in names)
    return item.name in sys.stdlib_module_names or item.name in rule.outside or rule.outside == ANYTHING


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_imports_only_what_it_may(folder: str) -> None:
    found = [item for path in sources(folder) for item in imports(path) if not is_allowed(item, rule_of(path))]
    assert found == []


def test_launch_starts_workers_by_name_and_imports_none() -> None:
    names = [i for path in sources("launch") for i in imports(path) if i.is_inside and i.name.startswith("workers")]
    found = [i for i in names if not i.where.startswith("launch/replay/")]  # which has its own rule above
    assert found == []


def test_only_three_files_import_zmq() -> None:
    found = {i.where.partition(":")[0] for p in sources() for i in imports(p) if i.name == "zmq"}
    assert found <= {"protocol/channels.py", "protocol/connection.py", "protocol/curve.py"}


def test_siblings_are_imported_relatively() -> None:
    own = {"triptych", *FOLDERS}
    assert [i for path in sources() for i in imports(path) if not i.is_inside and i.name in own] == []


def test_scheduling_is_pure() -> None:
    found = [i for path in sources("workers/execute/scheduling") for i in imports(path) if i.name in IMPURE]
    assert found == []


def test_no_deserialiser_can_run_code() -> None:
    assert [item for path in sources() for item in imports(path) if item.name in CODE_FROM_DATA] == []
    assert [call for path in sources() for call in dangerous_calls(path)] == []


def dotted(node: ast.expr) -> str:
    """``a.b.c``, or the part after the last call or index."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangerous_calls(path: Path) -> Iterator[str]:
    """Calls that execute their arguments, and ``allow_pickle``, ``trust_remote_code`` or ``shell`` switched on."""
    for node in nodes(path):
        if not isinstance(node, ast.Call):
            continue
        is_off = [isinstance(k.value, ast.Constant) and k.value.value is False for k in node.keywords]
        unsafe = [
            k.arg
            for k, off in zip(node.keywords, is_off, strict=True)
            if k.arg in ("allow_pickle", "trust_remote_code", "shell") and not off
        ]
        name = dotted(node.func)
        if name in RUNS_WHAT_IT_IS_GIVEN or unsafe:
            yield f"{relative(path)}:{node.lineno}: {name} {' '.join(map(str, unsafe))}".rstrip()


@pytest.mark.parametrize(
    ("source", "num_found"),
    [
        ("model.eval()", 0),
        ("eval('1')", 1),
        ("torch.load(path)", 1),
        ("load(path, trust_remote_code=flag)", 1),
        ("np.load(path, allow_pickle=False)", 0),
        ("yaml.load(text)", 1),
        ("yaml.safe_load(text)", 0),
        ("subprocess.run(command, shell=True)", 1),
        ("os.system(command)", 1),
    ],
)
def test_dangerous_calls_are_detected(
    tmp_path: Path, source: str, num_found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "file.py").write_text(source)
    assert len(list(dangerous_calls(tmp_path / "file.py"))) == num_found


@pytest.mark.parametrize("folder", ["protocol", "workers", "driver"])
def test_no_module_can_open_a_network_connection(folder: str) -> None:
    paths = [path for path in sources(folder) if path not in PLAIN_SOCKETS]
    assert [item for path in paths for item in imports(path) if item.name in OUTBOUND] == []


@pytest.mark.parametrize("path", PLAIN_SOCKETS, ids=relative)
def test_plain_sockets_are_local_or_duplicates(path: Path) -> None:
    calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
    made = [ast.unparse(node) for node in calls if ast.unparse(node.func).startswith("socket.")]
    assert set(made) == PLAIN_SOCKETS[path]


def test_no_source_contains_a_wildcard_address() -> None:
    assert [text for path in sources() for text in everywhere(path)] == []


def everywhere(path: Path) -> Iterator[str]:
    """Text that names every address of a machine, or an abstract socket, which no folder's mode protects."""
    refusing = {
        child
        for node in nodes(path)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_EVERYWHERE"
        for child in ast.walk(node)
    }
    for node in nodes(path):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in refusing
        if is_text and any(name in node.value for name in EVERYWHERE):  # type: ignore[attr-defined]
            yield f"{relative(path)}:{node.lineno}: {node.value!r:.80}"  # type: ignore[attr-defined]


def test_wildcard_addresses_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "file.py").write_text("bind('tcp://*:5')\n_EVERYWHERE = ('0.0.0.0',)\n")
    assert len(list(everywhere(tmp_path / "file.py"))) == 1


def test_package_consists_of_links() -> None:
    for name in FOLDERS:
        link = ROOT / "triptych" / name
        assert link.is_symlink()
        assert link.resolve() == (ROOT / name).resolve()


@pytest.mark.parametrize("name", ["pidfd_open", "memfd_create", "MFD_CLOEXEC", "P_PIDFD"])
def test_what_os_may_lack_is_used_in_one_place_only(name: str) -> None:
    """See ``protocol/system_calls.py``."""
    users = [relative(path) for path in sources() if f"os.{name}" in path.read_text(encoding="utf-8")]
    assert set(users) <= {"protocol/system_calls.py"}
