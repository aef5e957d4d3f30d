"""Plugins: found, checked at load, kept apart when broken, and never silently ignored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltaloom.orchestrator.errors import PluginError
from deltaloom.orchestrator.plugin_manager import (
    BUNDLED_PLUGINS,
    Plugins,
    create_plugins,
    import_file,
)

HEADER = """
from dataclasses import dataclass
from deltaloom.orchestrator import hookimpl

@dataclass(frozen=True)
class Config:
    size: int = 1

class Mine:
    name = "mine"
    Config = Config
    def __init__(self, config, run_dir=None): self.config = config
    def log(self, record): pass
    def close(self): pass
"""


def load(folder: Path, **files: str) -> Plugins:
    for name, body in files.items():
        (folder / f"{name}.py").write_text(HEADER + body)
    return create_plugins(plugins_dir=folder)


def failure(plugins: Plugins, name: str) -> str:
    return next(record.failure for record in plugins.records if record.name == name)


TRACKER = "\n@hookimpl\ndef register_trackers(): return [Mine]\n"


def test_every_bundled_plugin_loads_and_says_what_it_provides() -> None:
    records = {record.name: record for record in create_plugins().records}
    for name in BUNDLED_PLUGINS:
        assert records[name].failure == ""
        assert records[name].provides


def test_a_file_is_a_plugin(tmp_path: Path) -> None:
    plugins = load(tmp_path, good=TRACKER)
    assert plugins.component("tracker", "mine").name == "mine"
    assert str(tmp_path) in plugins.origins["tracker", "mine"]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("import no_such_module", "no_such_module"),
        ("def (:", "SyntaxError"),
        ("@hookimpl\ndef register_tracker(): return []", "Did you mean 'register_trackers'?"),
        ("@hookimpl\ndef before_node_run(node, zz): pass", "'zz'"),
        ("@hookimpl\ndef before_node_run(node='x'): pass", "must have no default"),
        ("@hookimpl\ndef before_node_run(*, node): pass", "must not be keyword-only"),
        ("@hookimpl\nasync def before_node_run(node): pass", "must not be async"),
        ("@hookimpl\ndef register_trackers(): return Mine", "must return a list"),
        ("@hookimpl\ndef register_trackers(): return [int]", "must have a `name`"),
        ("x = 1", "implements no hook"),
    ],
)
def test_a_broken_plugin_breaks_only_itself_and_says_why(
    tmp_path: Path, body: str, part: str
) -> None:
    plugins = load(tmp_path, broken=body, good=TRACKER)
    assert part in failure(plugins, "broken")
    assert plugins.component("tracker", "mine")


def test_a_missing_component_names_the_near_one_and_the_plugins_that_failed(
    tmp_path: Path,
) -> None:
    plugins = load(tmp_path, broken="raise RuntimeError('boom')")
    with pytest.raises(PluginError) as caught:
        plugins.component("tracker", "jsonll")
    assert "Did you mean 'jsonl'?" in str(caught.value)
    assert "boom" in str(caught.value)


def test_two_components_of_one_name_are_an_error_naming_both(tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        load(tmp_path, one=TRACKER, two=TRACKER)
    assert "one.py" in str(caught.value)
    assert "two.py" in str(caught.value)


def test_a_plugin_installed_twice_is_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for site in ("lib", "lib64"):
        info = tmp_path / site / "twice-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: twice\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[deltaloom]\ntwice = twice_plugin\n")
        (tmp_path / site / "twice_plugin.py").write_text(HEADER + TRACKER)
        monkeypatch.syspath_prepend(str(tmp_path / site))
    records = [r for r in create_plugins().records if r.name == "twice"]
    assert [(r.version, r.failure) for r in records] == [("1.0", "")]


def test_an_installed_plugin_that_fails_to_import_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "sad-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sad\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[deltaloom]\nsad = no_such_module_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "no_such_module_at_all" in failure(create_plugins(), "sad")


def test_an_older_hook_with_fewer_arguments_keeps_working(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    body = (
        "\nfrom pathlib import Path\n@hookimpl\n"
        f"def before_node_run(task): Path({str(seen)!r}).write_text(task)\n"
    )
    plugins = load(tmp_path, old=body)
    plugins.hook.before_node_run(node="n", task="n/1/0", worker="w")
    assert seen.read_text() == "n/1/0"


def test_a_missing_plugins_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="does not exist"):
        create_plugins(plugins_dir=tmp_path / "none")


def test_managers_are_independent(tmp_path: Path) -> None:
    load(tmp_path, good=TRACKER)
    with pytest.raises(PluginError):
        create_plugins().component("tracker", "mine")


def test_a_file_changed_within_the_second_at_the_same_size_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("value = 1\n")
    first, written = import_file(path), path.stat()
    assert import_file(path) is first
    path.write_text("value = 2\n")
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert (first.value, import_file(path).value) == (1, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["module.py"]
