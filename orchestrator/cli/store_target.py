"""Which store a verb works on: that of a run, or one given by its address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, PluginError, RunErrorCode

if TYPE_CHECKING:
    from ...storage.codec import DeltaCodec
    from ...storage.repository import PolicyRepository
    from ..inspect import StoredBranch
    from ..plugin_manager import Plugins


ALL_VERSIONS = 2**63
"""Beyond every version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTarget:
    """An open store, the branch meant, and the configuration of its run, empty if unknown."""

    repository: PolicyRepository
    branch: str
    plugins_dir: Path | None
    config: Mapping[str, Any]
    is_run: bool

    def plugins(self) -> Plugins:
        """The plugins that the run was made with."""
        from ..plugin_manager import create_plugins

        return create_plugins(plugins_dir=self.plugins_dir)

    def codecs(self) -> Mapping[str, DeltaCodec]:
        """Every codec there is, to read whatever the store holds."""
        from ..worker_weights import codec_lookup

        return codec_lookup(self.plugins().components["codec"])


def open_target(
    run: Path | None,
    store: str | None,
    *,
    branch: str | None = None,
    plugins_dir: Path | None = None,
    read_only: bool = True,
) -> StoreTarget:
    """The store at `store`, or of the run (the newest one when neither is given).

    Raises `ConfigError` when both are given, `RunError` or `NotFoundError` when it is not there.
    """
    if store is not None:
        if run is not None:
            raise ConfigError(
                f"a run ({str(run)!r}) and a store ({store!r}) were given; only one can be meant.",
                code=RunErrorCode.AMBIGUOUS_OPTION,
            )
        return _of_store(store, branch or "main", plugins_dir, read_only=read_only)
    return _of_run(run, branch, plugins_dir, read_only=read_only)


def open_stored(
    run: Path | None,
    store: str | None,
    *,
    branch: str | None = None,
    plugins_dir: Path | None = None,
) -> StoredBranch:
    """The branch that a question is about: of a run, or of a store alone.

    Raises as `open_target` does.
    """
    from ..inspect import StoredBranch, StoredRun, find_run

    if store is None:
        stored = StoredRun(find_run(run), branch=branch)
        stored.plugins_dir = plugins_dir or stored.plugins_dir
        return stored
    target = open_target(run, store, branch=branch, plugins_dir=plugins_dir)
    return StoredBranch(
        target.repository, target.branch, config=target.config, plugins_dir=plugins_dir
    )


def split_words(words: Sequence[str], *, names: Sequence[str]) -> tuple[Path | None, list[str]]:
    """An optional run before the words named. Raises `ConfigError` for another number of words."""
    extra = len(words) - len(names)
    if extra not in (0, 1):
        raise ConfigError(
            f"expected [RUN] {' '.join(names)}, got {len(words)} words: {' '.join(words)}.",
            code=RunErrorCode.WRONG_TYPE,
        )
    return (Path(words[0]) if extra else None), list(words[extra:])


def as_ref(text: str) -> int | str:
    """A version as the store takes it: a number, or a tag, branch, `branch@number` or id."""
    return int(text) if text.lstrip("-").isdigit() else text


def version_bounds(text: str | None) -> tuple[int | None, int | None]:
    """`A:B`, both ends included; either may be left out, and `A` alone is that version.

    Raises `ConfigError` for anything else.
    """
    if text is None:
        return None, None
    first, colon, last = text.partition(":")
    if not all(part.isdigit() or (colon and not part) for part in (first, last or first)):
        raise ConfigError(
            f"--versions must be A:B, A:, :B or A with numbers, got {text!r}.",
            code=RunErrorCode.WRONG_TYPE,
        )
    low = int(first) if first else None
    return low, int(last) if last else (None if colon else low)


def version_range(text: str | None) -> range | None:
    """The versions that `version_bounds` reads; None for all."""
    if text is None:
        return None
    first, last = version_bounds(text)
    return range(first or 0, ALL_VERSIONS if last is None else last + 1)


def write_model_files(target: StoreTarget, folder: Path) -> list[str]:
    """Configuration and tokenizer files of the run's model, if its plugin offers them.

    Returns the names written; none when the model is unknown or its plugin is not installed.
    """
    from ..config import build_config
    from ..interfaces import ExportsFiles

    values = dict(target.config.get("model", {}))
    name = values.pop("name", "")
    try:
        component = target.plugins().component("model", name)
    except PluginError:
        return []
    model = component(build_config(component.Config, values, path="model"))
    return list(model.export_files(folder)) if isinstance(model, ExportsFiles) else []


def _of_run(
    run: Path | None, branch: str | None, plugins_dir: Path | None, *, read_only: bool
) -> StoreTarget:
    from ...storage.repository import PolicyRepository
    from ..inspect import find_run
    from ..run_dir import open_run, read_config

    run_dir, manifest = open_run(find_run(run))
    return StoreTarget(
        repository=PolicyRepository.open(manifest.store_url, read_only=read_only),
        branch=branch or manifest.branch,
        plugins_dir=plugins_dir or (Path(manifest.plugins_dir) if manifest.plugins_dir else None),
        config=read_config(run_dir),
        is_run=True,
    )


def _of_store(store: str, branch: str, plugins_dir: Path | None, *, read_only: bool) -> StoreTarget:
    from ...storage.repository import PolicyRepository
    from ..inspect import first_config

    repository = PolicyRepository.open(store, read_only=read_only)
    return StoreTarget(
        repository=repository,
        branch=branch,
        plugins_dir=plugins_dir,
        config=first_config(repository, branch),
        is_run=False,
    )
