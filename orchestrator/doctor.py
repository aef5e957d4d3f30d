"""`deltaloom doctor`: what this machine has, and what a run would miss. Each check stands alone."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal

from ..storage.errors import DeltaloomError
from .plugin_manager import create_plugins

Verdict = Literal["ok", "warn", "fail"]
LOW_DISK_BYTES = 2 * 1024**3
REQUIRED = ("torch", "zarr", "icechunk", "numba", "zstandard", "pluggy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding, and what to do about it when it is not fine."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def run_checks(*, store_url: str | None, plugins_dir: Path | None) -> list[Check]:
    """Every check, in order; none of them raises."""
    checks: Sequence[Callable[[], Check]] = (
        check_python,
        *(lambda name=name: check_package(name) for name in REQUIRED),
        check_titan,
        check_accelerator,
        check_memory,
        check_disk,
        lambda: check_store(store_url),
        lambda: check_plugins(plugins_dir),
    )
    return [check() for check in checks]


def check_python() -> Check:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check(name="python", verdict="ok", found=version)
    return Check(
        name="python", verdict="fail", found=version, remedy="Use Python 3.11, 3.12 or 3.13."
    )


def check_package(name: str) -> Check:
    try:
        module = import_module(name)
    except ImportError as error:
        return Check(
            name=name,
            verdict="fail",
            found=str(error),
            remedy=f"Install it: pip install {name}.",
        )
    return Check(name=name, verdict="ok", found=str(getattr(module, "__version__", "present")))


def check_titan() -> Check:
    """Whether trainer `titan` can be used; it is optional."""
    wanted = {"torchtitan": "0.3.0", "torchmonarch": "0.7.0"}
    found = {name: _installed_version(name) for name in wanted}
    remedy = "Install it: pip install 'deltaloom[titan]'."
    if not any(found.values()):
        return Check(name="titan", verdict="ok", found=f"not installed (optional). {remedy}")
    try:
        for module in ("torchtitan", "monarch.actor"):
            import_module(module)
    except ImportError as error:
        return Check(
            name="titan",
            verdict="warn",
            found=str(error),
            remedy=f"{remedy} The package `monarch` is another project: uninstall it.",
        )
    words = ", ".join(f"{name} {found[name] or 'missing'}" for name in wanted)
    if found != wanted:
        return Check(name="titan", verdict="warn", found=words, remedy=remedy)
    return Check(name="titan", verdict="ok", found=words)


def _installed_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def check_accelerator() -> Check:
    import torch

    cores = f"{os.cpu_count()} CPU cores"
    if not torch.cuda.is_available():
        return Check(name="accelerator", verdict="ok", found=f"no GPU; {cores}")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check(name="accelerator", verdict="ok", found=f"{', '.join(names)}; {cores}")


def check_memory() -> Check:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return Check(name="memory", verdict="ok", found="unknown")
    size_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Check(name="memory", verdict="ok", found=f"{size_bytes / 1024**3:.1f} GiB")


def check_disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / 1024**3:.1f} GiB free in {Path.cwd()}"
    if free < LOW_DISK_BYTES:
        return Check(name="disk", verdict="warn", found=found, remedy="Free some space.")
    return Check(name="disk", verdict="ok", found=found)


def check_store(store_url: str | None) -> Check:
    """Reach the store named, or write, commit and read back one in a temporary folder."""
    from ..storage.repository import PolicyRepository

    try:
        if store_url is not None:
            repository = PolicyRepository.open(store_url, read_only=True)
            return Check(name="store", verdict="ok", found=f"{store_url} is reachable")
        with tempfile.TemporaryDirectory() as folder:
            repository = PolicyRepository.create(Path(folder) / "store")
            repository.branches()
    except (DeltaloomError, OSError) as error:
        return Check(name="store", verdict="fail", found=str(error))
    return Check(name="store", verdict="ok", found="a local store can be written")


def check_plugins(plugins_dir: Path | None) -> Check:
    try:
        plugins = create_plugins(plugins_dir=plugins_dir)
    except DeltaloomError as error:
        return Check(name="plugins", verdict="fail", found=str(error))
    broken = [f"{record.name}: {record.failure}" for record in plugins.records if record.failure]
    if broken:
        return Check(name="plugins", verdict="warn", found="; ".join(broken))
    return Check(name="plugins", verdict="ok", found=f"{len(plugins.records)} load")
