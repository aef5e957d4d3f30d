"""What the layout promises: one package, light imports, layers that go one way."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

from .run_support import REPOSITORY


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter that ran `code`."""
    program = (
        f"import sys\n{code}\nprint(' '.join(sorted(m.partition('.')[0] for m in sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(out.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import deltaloom.orchestrator.cli",
        "import deltaloom.orchestrator.config",
        "import deltaloom.orchestrator.hookspecs",
        "from deltaloom.orchestrator import Pipeline, Prompt, hookimpl",
        "import deltaloom.orchestrator.testing",
        "from deltaloom.orchestrator.plugin_manager import create_plugins; create_plugins()",
    ],
)
def test_looking_at_pipelines_and_plugins_loads_no_heavy_library(code: str) -> None:
    assert not modules_after(code) & {"torch", "zarr", "icechunk", "numba", "transformers", "dask"}


def test_the_store_does_not_load_torch_or_pluggy() -> None:
    loaded = modules_after("import deltaloom.storage.repository, deltaloom.storage.subscriber")
    assert not loaded & {"torch", "pluggy", "typer"}


def test_a_bare_import_of_a_layer_fails() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import orchestrator.dsl"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0


@pytest.mark.parametrize("name", ["storage", "orchestrator"])
def test_public_names_exist_and_are_sorted(name: str) -> None:
    package = import_module(f"deltaloom.{name}")
    assert package.__all__ == sorted(package.__all__)
    for public in package.__all__:
        assert getattr(package, public) is not None


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_wheel_contains_the_package_alone(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, "."],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"deltaloom"}
    for part in ("storage", "orchestrator", "plugins", "pipelines"):
        assert f"deltaloom/{part}/__init__.py" in names
    assert "deltaloom/py.typed" in names
    assert "deltaloom/orchestrator/report/templates/report.html.j2" in names
