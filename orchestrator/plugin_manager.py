"""Finding plugins, keeping the broken ones apart, and looking components up by name.

Every process makes its own manager from the same inputs; there is no global one. Bundled
plugins are named as strings and registered like any other.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pluggy

from . import hookspecs
from .errors import PluginError, RunErrorCode, boundary, suggest

BUNDLED_PLUGINS = (
    "codecs.context",
    "codecs.coo_zstd",
    "codecs.full",
    "codecs.raw",
    "codecs.xor_zstd",
    "models.actor_critic",
    "models.hf",
    "models.smollm2",
    "models.titan",
    "models.transformer",
    "engines.hf_engine",
    "engines.torch_engine",
    "trainers.fused_trainer",
    "trainers.hf_trainer",
    "trainers.titan_trainer",
    "trainers.torch_trainer",
    "algorithms.grpo",
    "algorithms.ppo",
    "algorithms.reinforce",
    "algorithms.sft",
    "optimizers.adamw",
    "optimizers.delayed_sgd",
    "optimizers.nadam",
    "optimizers.nesterov_delay",
    "optimizers.pipemare",
    "optimizers.xpipe",
    "fusion.inter_planner",
    "fusion.intra_planner",
    "fusion.prediction",
    "guards.rules",
    "pipeline.prediction",
    "pipeline.trainer",
    "inference.reference",
    "inference.values",
    "scorers.function",
    "executors.dask_executor",
    "executors.local",
    "trackers.jsonl",
    "trackers.prometheus",
    "trackers.tensorboard",
    "trackers.wandb",
    "trackers.otel",
)

KINDS = (
    "codec",
    "model",
    "engine",
    "trainer",
    "algorithm",
    "optimizer",
    "scorer",
    "inference",
    "executor",
    "fusion_planner",
    "verifier",
    "tracker",
    "guard",
    "simulator",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRecord:
    """One plugin found, for listing: where it came from, what it provides, or why it failed."""

    name: str
    origin: str
    version: str = ""
    provides: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    failure: str = ""


@dataclass(slots=True)
class _Found:
    name: str
    origin: str
    version: str
    load: Any


@dataclass(frozen=True, slots=True)
class Plugins:
    """Registered plugins: `hook` to call, components by kind and name, and the listing.

    `hook` is pluggy's relay; `records` includes the plugins that failed to load.
    """

    hook: Any
    components: dict[str, dict[str, type[Any]]]
    origins: dict[tuple[str, str], str]
    records: tuple[PluginRecord, ...] = field(default=())

    def component(self, kind: str, name: str) -> type[Any]:
        """The class of a component. Raises `PluginError` with the near match, or the reason why
        a plugin that may have provided it failed to load."""
        known = self.components[kind]
        if name in known:
            return known[name]
        broken = [f"{r.name} ({r.failure})" for r in self.records if r.failure]
        hint = f" Plugins that failed to load: {'; '.join(broken)}." if broken else ""
        raise PluginError(
            f"there is no {kind} named {name!r}. {suggest(name, known)}{hint}",
            code=RunErrorCode.UNKNOWN_PLUGIN,
        )


def create_plugins(*, plugins_dir: Path | None = None, entry_point_plugins: bool = True) -> Plugins:
    """A fresh manager with bundled plugins, installed ones, and the files of `plugins_dir`.

    A plugin that fails to import, or whose hooks do not fit, is recorded and left out. Two
    components of one kind and name raise `PluginError` naming both origins.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    for specs in hookspecs.ALL_SPECS:
        manager.add_hookspecs(specs)
    found = [*_bundled(), *(_installed() if entry_point_plugins else ()), *_files(plugins_dir)]
    components: dict[str, dict[str, type[Any]]] = {kind: {} for kind in KINDS}
    origins: dict[tuple[str, str], str] = {}
    records: list[PluginRecord] = []
    seen: set[int] = set()
    for candidate in found:
        record = _register(manager, candidate, components, origins, seen)
        if record is not None:
            records.append(record)
    return Plugins(manager.hook, components, origins, tuple(records))


def _register(
    manager: pluggy.PluginManager,
    candidate: _Found,
    components: dict[str, dict[str, type[Any]]],
    origins: dict[tuple[str, str], str],
    seen: set[int],
) -> PluginRecord | None:
    """Register one plugin; None when the same object was registered before."""
    record = PluginRecord(name=candidate.name, origin=candidate.origin, version=candidate.version)
    try:
        with boundary(PluginError, f"plugin {candidate.name!r} from {candidate.origin}"):
            plugin = candidate.load()
            if id(plugin) in seen:
                return None
            _check_hooks(manager, plugin)
            provided = _provided(plugin)
    except PluginError as error:
        return _failed(record, str(error))
    for kind, component in provided:
        _add_component(kind, component, candidate.origin, components, origins)
    manager.register(plugin, name=f"{candidate.name} ({candidate.origin})")
    seen.add(id(plugin))
    return PluginRecord(
        name=record.name,
        origin=record.origin,
        version=record.version,
        provides=tuple(f"{kind}:{component.name}" for kind, component in provided),
        hooks=tuple(sorted(name for name, _ in _implementations(plugin))),
    )


def _failed(record: PluginRecord, failure: str) -> PluginRecord:
    return PluginRecord(
        name=record.name, origin=record.origin, version=record.version, failure=failure
    )


def _implementations(plugin: object) -> list[tuple[str, Any]]:
    marker = f"{hookspecs.PROJECT_NAME}_impl"
    return [
        (name, member)
        for name, member in inspect.getmembers(plugin, callable)
        if getattr(member, marker, None)
    ]


def _check_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    """Refuse what pluggy would accept and then never call, or call with other values."""
    if isinstance(plugin, type):
        raise _bad_hook(f"{plugin.__name__} is a class; register an instance or a module")
    known = [name for specs in hookspecs.ALL_SPECS for name in vars(specs) if name[0] != "_"]
    implementations = _implementations(plugin)
    if not implementations:
        raise _bad_hook("it implements no hook; mark functions with @hookimpl")
    for name, function in implementations:
        if name not in known:
            raise _bad_hook(f"there is no hook {name!r}. {suggest(name, known)}")
        if inspect.iscoroutinefunction(function):
            raise _bad_hook(f"hook {name!r} must not be async")
        _check_arguments(name, function, getattr(manager.hook, name).spec.argnames)


def _check_arguments(name: str, function: Any, allowed: Sequence[str]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            raise _bad_hook(f"argument {parameter.name!r} of {name!r} must not be keyword-only")
        if parameter.default is not parameter.empty:
            raise _bad_hook(f"argument {parameter.name!r} of {name!r} must have no default")
        if parameter.name not in allowed:
            near = suggest(parameter.name, allowed)
            raise _bad_hook(f"hook {name!r} has no argument {parameter.name!r}. {near}")


def _bad_hook(message: str) -> PluginError:
    return PluginError(f"{message}.", code=RunErrorCode.BROKEN_PLUGIN)


def _provided(plugin: object) -> list[tuple[str, type[Any]]]:
    provided = []
    for kind in KINDS:
        register = getattr(plugin, f"register_{kind}s", None)
        if register is None:
            continue
        classes = register()
        if not isinstance(classes, list):
            raise _bad_hook(f"register_{kind}s must return a list of classes, got {classes!r}")
        for component in classes:
            if not isinstance(getattr(component, "name", None), str) or not hasattr(
                component, "Config"
            ):
                raise _bad_hook(f"{kind} {component!r} must have a `name` and a `Config`")
            provided.append((kind, component))
    return provided


def _add_component(
    kind: str,
    component: type[Any],
    origin: str,
    components: dict[str, dict[str, type[Any]]],
    origins: dict[tuple[str, str], str],
) -> None:
    existing = components[kind].get(component.name)
    if existing is not None and existing is not component:
        raise PluginError(
            f"{kind} {component.name!r} is defined twice: by {origins[kind, component.name]} "
            f"and by {origin}.",
            code=RunErrorCode.DUPLICATE_PLUGIN,
            remedy="Rename or remove one of them.",
        )
    components[kind][component.name] = component
    origins[kind, component.name] = origin


def _bundled() -> Iterable[_Found]:
    package = __package__.rpartition(".")[0]
    version = sys.modules[package].__version__
    for name in BUNDLED_PLUGINS:
        module = f"{package}.plugins.{name}"
        yield _Found(
            name, "bundled", version, lambda module=module: importlib.import_module(module)
        )


def _installed() -> Iterable[_Found]:
    seen: set[tuple[str, str]] = set()
    for point in entry_points(group=hookspecs.PROJECT_NAME):
        key = (point.name, point.value)
        if key in seen:
            continue
        seen.add(key)
        name = point.dist.name if point.dist else "?"
        version = point.dist.version if point.dist else ""
        yield _Found(point.name, f"package {name}", version, point.load)


def _files(plugins_dir: Path | None) -> Iterable[_Found]:
    if plugins_dir is None:
        return
    if not plugins_dir.is_dir():
        raise PluginError(
            f"plugins directory {str(plugins_dir)!r} does not exist.",
            code=RunErrorCode.BROKEN_PLUGIN,
        )
    for path in sorted(plugins_dir.glob("*.py")):
        yield _Found(path.stem, f"file {path}", "", lambda path=path: import_file(path))


class _SourceLoader(SourceFileLoader):
    """Compiles a file each time: neither reads nor writes a compiled one."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(path: Path) -> ModuleType:
    """A Python file as a module under a name of its own, whatever its file is called.

    A file that was changed since is another module, also within the second and at the same size,
    for which Python would take the compiled file it kept.
    """
    content = str(path.resolve()).encode() + b"\0" + path.read_bytes()
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    name = f"deltaloom_file_{digest}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
