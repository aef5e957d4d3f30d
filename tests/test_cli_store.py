"""The verbs that care for a store: verify, export, import, gc, tag, branch, log --graph."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deltaloom.orchestrator.cli.graph_text import draw_history
from deltaloom.orchestrator.cli.store_target import split_words, version_range
from deltaloom.orchestrator.errors import ConfigError
from deltaloom.storage import PolicyRepository, Publisher
from deltaloom.storage.graph import log_graph

from .run_support import deltaloom, tiny_pipeline, versions
from .storage_support import CountCodec, flip_bit, history_of, publish_all, stored_objects


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps, anchors every four, state every three."""
    folder = tmp_path_factory.mktemp("store")
    done = deltaloom("run", tiny_pipeline(folder, steps=5), "--run-dir", folder / "run")
    assert done.status == 0, done.err
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run, to change. Its manifest names the store by its absolute path."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    manifest = (copy / "run.json").read_text(encoding="utf-8")
    (copy / "run.json").write_text(manifest.replace(str(finished), str(copy)), encoding="utf-8")
    return copy


def test_a_sound_run_verifies_whole_and_in_part(finished: Path) -> None:
    whole = deltaloom("verify", finished, "--json")
    assert whole.status == 0
    assert whole.json == {"versions": 6, "sound": True, "faults": []}
    part = deltaloom("verify", "--store", finished / "store", "--versions", "2:4", "--json")
    assert part.json["versions"] == 3
    assert "6 versions verified" in deltaloom("verify", finished).out


def test_damage_is_an_exit_status_and_a_named_version(run: Path) -> None:
    largest = max(stored_objects(run / "store", "chunks"), key=lambda path: path.stat().st_size)
    flip_bit(largest, offset=-100)
    done = deltaloom("verify", run, "--json")
    assert done.status == 1
    assert not done.json["sound"]
    fault = done.json["faults"][0]
    assert fault["code"]
    assert f"version {fault['version']}" in fault["message"]
    assert "faults" in deltaloom("verify", run, "--first").out


def test_an_empty_range_is_not_a_success(finished: Path) -> None:
    done = deltaloom("verify", finished, "--versions", "8:9")
    assert done.status == 2
    assert "nothing was verified" in done.err


def test_a_version_goes_out_and_comes_back(finished: Path, tmp_path: Path) -> None:
    out = deltaloom("export", finished, "3", "--to", tmp_path / "x" / "y", "--json").json
    assert out["files"][0] == "model.safetensors"
    weights = shapes_of(tmp_path / "x" / "y" / "model.safetensors")
    assert weights["model.norm.weight"] == [16]
    made = deltaloom(
        "import", tmp_path / "x" / "y" / "model.safetensors", "--store", tmp_path / "s", "--json"
    ).json
    assert made["version"] == 0
    assert made["state_digest"] == out["state_digest"]
    again = deltaloom(
        "import", tmp_path / "x" / "y" / "model.safetensors", "--store", made["store"]
    )
    assert again.status == 1
    assert "store-exists" in again.err
    exported = deltaloom("export", "0", "--store", made["store"], "--to", tmp_path / "z", "--json")
    assert exported.json["state_digest"] == out["state_digest"]


def test_an_import_can_be_read_by_name_of_another_codec(tmp_path: Path) -> None:
    save_file({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / "m.safetensors")
    arguments = ("import", tmp_path / "m.safetensors", "--store", tmp_path / "s")
    assert deltaloom(*arguments, "--codec", "zip").status == 2
    assert not (tmp_path / "s").exists()
    assert deltaloom(*arguments, "--codec", "raw", "--json").json["tensors"] == 1
    deltaloom("export", "main", "--store", tmp_path / "s", "--to", tmp_path)
    np.testing.assert_array_equal(
        load_file(tmp_path / "model.safetensors")["w"], [[0, 1, 2], [3, 4, 5]]
    )


def test_gc_says_first_and_removes_then(run: Path) -> None:
    before = stored_objects(run / "store", ".")
    dry = deltaloom("gc", run, "--keep-last", "1", "--json").json
    assert dry["dry_run"]
    assert stored_objects(run / "store", ".") == before
    reasons = {row["version"]: row["why"] for row in dry["kept"]}
    assert reasons[0] == ["options of the run"]
    assert "head of main" in reasons[5]
    assert reasons[4] == ["resuming the run"]
    gone = [row["version"] for row in dry["removed"]]
    assert gone == [2, 1]
    done = deltaloom("gc", run, "--keep-last", "1", "--apply", "--json").json
    assert [row["version"] for row in done["removed"]] == gone
    assert done["deleted_bytes"] > 0
    assert deltaloom("gc", run, "--keep-last", "1", "--json").json["removed"] == []


def test_a_run_can_be_resumed_after_gc(run: Path, finished: Path) -> None:
    assert deltaloom("gc", run, "--keep-last", "1", "--apply").status == 0
    resumed = deltaloom("resume", run, "--steps", "6", "--json")
    assert resumed.status == 0, resumed.err
    assert versions(run)[-2][:2] == versions(finished)[-1][:2]
    assert versions(run)[-1][0] == 6


def test_a_forked_run_can_be_resumed_after_gc(run: Path) -> None:
    forked = deltaloom("resume", run, "--from", "2", "--branch", "try", "--json")
    assert forked.status == 0, forked.err
    plan = deltaloom("gc", run, "--keep-last", "1", "--apply", "--json").json
    reasons = {why for row in plan["kept"] for why in row["why"]}
    assert {"head of try", "head of main", "options of the run"} <= reasons
    resumed = deltaloom("resume", run, "--steps", "6", "--json")
    assert resumed.status == 0, resumed.err
    assert deltaloom("verify", run, "--json").json["sound"]


def test_tags_and_branches_name_versions_for_good(run: Path) -> None:
    made = deltaloom("tag", run, "best", "2", "--json").json
    assert (made["tag"], made["version"]) == ("best", 2)
    assert deltaloom("tag", run, "best", "3").status == 1
    fork = deltaloom("branch", "try", "best", "--store", run / "store", "--json").json
    assert fork["snapshot_id"] == made["snapshot_id"]
    kept = deltaloom("gc", run, "--keep-last", "1", "--json").json["kept"]
    assert {"tag best", "head of try"} <= {
        why for row in kept if row["version"] == 2 for why in row["why"]
    }
    text = deltaloom("log", run, "--graph").out
    assert "(main)" in text.splitlines()[0]
    assert "(try, tag best)" in text
    rows = deltaloom("log", run, "--graph", "--json").json
    assert [row["version"] for row in rows] == [5, 4, 3, 2, 1, 0]


def test_requests_that_cannot_be_meant_are_refused(finished: Path, tmp_path: Path) -> None:
    both = deltaloom("verify", finished, "--store", finished / "store")
    assert both.status == 2
    assert "only one" in both.err
    assert deltaloom("export", finished, "3", "4", "--to", tmp_path).status == 2
    assert deltaloom("verify", "--store", tmp_path / "none").status == 2
    for text in ("x", ":x", "1:2:3", "", "-1"):
        with pytest.raises(ConfigError, match="A:B"):
            version_range(text)
    assert version_range("2:4") == range(2, 5)
    assert version_range("3") == range(3, 4)
    assert version_range(":4") == range(5)
    assert 10**9 in (version_range("7:") or ())
    assert split_words(["a"], names=["V"]) == (None, ["a"])


def test_a_fork_is_drawn_in_a_column_of_its_own(tmp_path: Path) -> None:
    states = history_of(5)
    repository = PolicyRepository.create(tmp_path / "s")
    with Publisher(repository, codec=CountCodec()) as publisher:
        publish_all(publisher, states[:3])
    repository.branch("fork", 1)
    with Publisher(repository, codec=CountCodec(), branch="fork") as publisher:
        publish_all(publisher, states[2:5], first=2)
    lines = draw_history(log_graph(repository))
    columns = [line[:4].rstrip() for line in lines]
    assert columns == ["  *", "  *", "  *", "* |", "|/", "*", "*"]
    assert "(fork)" in lines[0]
    assert any("(main)" in line for line in lines)


def shapes_of(path: Path) -> dict[str, list[int]]:
    """Shapes by name; numpy has no bf16 to load the values as."""
    import torch
    from safetensors.torch import load_file as load_tensors

    tensors = load_tensors(path)
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    return {name: list(tensor.shape) for name, tensor in tensors.items()}
