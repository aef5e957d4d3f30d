"""The documentation is executed: README files and commands, links, names of files and verbs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from .run_support import REPOSITORY, deltaloom

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
DOCUMENTED = ("orchestrator", "storage", "plugins", "pipelines", "docs")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def write_files(folder: Path) -> list[Path]:
    """Write each Python block that begins with the name of a file."""
    written = []
    for block in blocks("python"):
        named = re.match(r"# (\S+\.py)\n", block)
        if named:
            path = folder / named.group(1)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block, encoding="utf-8")
            written.append(path)
    return written


def test_the_readme_works_as_written(tmp_path: Path) -> None:
    assert [path.name for path in write_files(tmp_path)] == ["count.py", "centred.py"]
    commands = [
        line.removeprefix("$ deltaloom ")
        for block in blocks("console")
        for line in block.splitlines()
        if line.startswith("$ deltaloom ")
    ]
    assert len(commands) >= 7
    for line in commands:
        done = deltaloom(*shlex.split(line), cwd=tmp_path)
        assert done.status == 0, f"{line}\n{done.err}"
    shown = deltaloom("show", "0", "--run", "runs/centred", "--json", cwd=tmp_path).json
    assert shown["attributes"]["config"]["train"]["algorithm"]["name"] == "centred"


def test_the_two_commands_are_make_targets() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_every_verb_is_in_the_table() -> None:
    listed = deltaloom("--help").out.partition("Commands:")[2]
    verbs = {line.split()[0] for line in listed.splitlines() if re.match(r"  \S", line)}
    for verb in verbs:
        assert re.search(rf"`{verb}\b", README), verb


def test_links_and_named_files_exist() -> None:
    folders = [REPOSITORY / name for name in DOCUMENTED]
    pages = [REPOSITORY / "README.md", *(page for f in folders for page in f.rglob("*.md"))]
    assert len(pages) >= 9
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_hook_is_in_the_plugin_reference() -> None:
    from deltaloom.orchestrator import hookspecs

    text = (REPOSITORY / "plugins" / "README.md").read_text(encoding="utf-8")
    for specs in hookspecs.ALL_SPECS:
        for hook in (name for name in vars(specs) if not name.startswith("_")):
            assert f"`{hook}`" in text, hook


def test_every_module_of_the_orchestrator_is_in_its_readme() -> None:
    text = (REPOSITORY / "orchestrator" / "README.md").read_text(encoding="utf-8")
    for path in (REPOSITORY / "orchestrator").glob("*.py"):
        if path.name not in ("__init__.py", "errors.py", "types.py"):
            assert path.name in text, path.name


def test_pipeline_recipes_name_real_options() -> None:
    text = (REPOSITORY / "pipelines" / "README.md").read_text(encoding="utf-8")
    for override in re.findall(r"--set (\w+\.\S+?=\S+?)`", text):
        done = deltaloom("plan", REPOSITORY / "pipelines" / "quickstart.py", "--set", override)
        assert done.status == 0, done.err
