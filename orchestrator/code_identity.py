"""What code a process would run: compared between driver and worker before a task is given away.

A worker on another machine may have another version of deltaloom, of a plugin or of torch, and
would then give other rollouts, or none. Two processes with equal identities run the same code.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .executor import WorkerBootstrap
from .plugin_manager import PluginRecord, create_plugins

_FOLDERS = ("storage", "orchestrator", "plugins")
_LIBRARIES = ("torch", "numpy")
_MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeIdentity:
    """Versions and digests of all that decides what a task computes. JSON values only.

    `source` is a digest of deltaloom's own files, `pipeline` one of the pipeline file;
    `plugins` has a version or, for a file, a digest by the plugin's name and kind of origin.
    """

    deltaloom: str
    source: str
    python: str
    libraries: Mapping[str, str]
    plugins: Mapping[str, str]
    pipeline: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def code_identity(bootstrap: WorkerBootstrap) -> CodeIdentity:
    """The identity of this process for a run. Raises `PluginError` as `create_plugins` does."""
    package = Path(__file__).resolve().parent.parent
    directory = Path(bootstrap.plugins_dir) if bootstrap.plugins_dir else None
    records = create_plugins(plugins_dir=directory).records
    own = next((record.version for record in records if record.origin == "bundled"), "")
    return CodeIdentity(
        deltaloom=own,
        source=_digest(path for name in _FOLDERS for path in (package / name).rglob("*.py")),
        python=".".join(platform.python_version_tuple()[:2]),
        libraries={name: _version(name) for name in _LIBRARIES},
        plugins=dict(
            _plugin_entry(record, directory) for record in records if record.origin != "bundled"
        ),
        pipeline=_file_digest(Path(bootstrap.pipeline_path)),
    )


def differences_of(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What a worker has that the driver has not, in words; empty when they run the same code.

    Both are identities in their JSON form.
    """
    words = [
        _unlike(name, expected[name], found.get(name, _MISSING))
        for name in ("deltaloom", "python")
        if expected[name] != found.get(name)
    ]
    if not words and expected["source"] != found.get("source"):
        words.append(f"its files of deltaloom {expected['deltaloom']} differ from the driver's")
    for group, kind in (("libraries", ""), ("plugins", "plugin ")):
        here, there = expected[group], found.get(group, {})
        words += [
            _unlike(f"{kind}{name}", here.get(name, _MISSING), there.get(name, _MISSING))
            for name in sorted(here.keys() | there.keys())
            if here.get(name) != there.get(name)
        ]
    if expected["pipeline"] != found.get("pipeline"):
        words.append(_unlike("pipeline file", expected["pipeline"], found.get("pipeline", "")))
    return words


def _unlike(what: str, here: str, there: str) -> str:
    return f"{what} is {there} there, {here} here"


def _plugin_entry(record: PluginRecord, directory: Path | None) -> tuple[str, str]:
    kind = record.origin.partition(" ")[0]
    what = record.version
    if kind == "file" and directory is not None:
        what = _file_digest(directory / f"{record.name}.py")
    return f"{record.name} ({kind})", "failed to load" if record.failure else what


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _MISSING


def _file_digest(path: Path) -> str:
    return _digest([path]) if path.is_file() else _MISSING


def _digest(paths: Iterable[Path]) -> str:
    """Digest of the files' contents, in the order of their names."""
    hasher = hashlib.blake2b(digest_size=8)
    for path in sorted(paths, key=lambda path: path.as_posix()):
        hasher.update(f"{path.name}\0".encode())
        hasher.update(hashlib.blake2b(path.read_bytes(), digest_size=16).digest())
    return hasher.hexdigest()
