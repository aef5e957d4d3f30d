"""Questions about a stored run, or about a store alone, answered as JSON values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..storage.bits import PolicyTensors
from ..storage.codec import DeltaCodec
from ..storage.errors import NotFoundError
from ..storage.records import CommitInfo
from ..storage.repository import PolicyRepository
from .accounting import Accounting, accounting_from_json
from .errors import RunError, RunErrorCode
from .run_dir import FIRST_BRANCH, RunDir, RunManifest, open_run, read_config
from .version_notes import VersionNotes, all_findings, newest_evaluations, version_notes

if TYPE_CHECKING:
    from .interfaces import Tokenizer
    from .stored_rollouts import StoredRollout

Json = dict[str, Any]


def find_run(path: Path | None) -> Path:
    """The run meant: the path given, or that of `runs/` which was last at work.

    Raises `RunError`.
    """
    if path is not None:
        return path
    candidates = [file.parent for file in Path("runs").glob("*/run.json")]
    if not candidates:
        raise RunError(
            f"no run was named and there is none in {str(Path('runs').absolute())!r}.",
            code=RunErrorCode.RUN_NOT_FOUND,
            remedy="Name one with --run.",
        )
    return max(candidates, key=_last_at_work)


class StoredBranch:
    """A branch of a store, opened for reading."""

    def __init__(
        self,
        repository: PolicyRepository,
        branch: str,
        *,
        config: Mapping[str, Any],
        plugins_dir: Path | None = None,
    ) -> None:
        """`config` are the options of its run, where they are known."""
        self.repository = repository
        self.branch = branch
        self.config = config
        self.plugins_dir = plugins_dir

    @staticmethod
    def open(
        store: str, *, branch: str = FIRST_BRANCH, plugins_dir: Path | None = None
    ) -> StoredBranch:
        """A branch of the store at an address. Raises `NotFoundError` if there is no store."""
        repository = PolicyRepository.open(store, read_only=True)
        config = first_config(repository, branch)
        return StoredBranch(repository, branch, config=config, plugins_dir=plugins_dir)

    def info(self, ref: str) -> CommitInfo:
        """A version by number, tag, branch, `branch@number` or snapshot id."""
        number = int(ref) if ref.lstrip("-").isdigit() else None
        return self.repository.info(number if number is not None else ref, branch=self.branch)

    def log(self, *, limit: int | None = None) -> list[Json]:
        """The branch's versions, newest first."""
        infos = self.repository.log(self.branch, limit=limit)
        notes = version_notes(self.repository, infos)
        return [
            version_line(info) | notes.get(info.snapshot_id, VersionNotes()).to_json()
            for info in infos
        ]

    def metrics(self) -> list[Json]:
        """The metrics of each version after 0 that was kept, oldest first."""
        return [
            {"version": info.version, **info.attributes.get("metrics", {})}
            for info in reversed(self.repository.log(self.branch))
            if info.version > 0
        ]

    def rollouts(self, ref: str | int) -> list[Json]:
        """Every rollout of the groups that a version closed, trained on or left out, as rows."""
        from .stored_rollouts import stored_groups

        info, tokenizer = self.info(str(ref)), self.tokenizer()
        return [
            {
                "group": group.id,
                "prompt": _text(group.prompt_tokens, tokenizer),
                "answer": group.answer,
                **rollout_line(rollout, tokenizer),
            }
            for group in stored_groups(self.repository, info)
            for rollout in group.rollouts
        ]

    def show(self, ref: str) -> Json:
        """Everything about one version: commit, metrics, ledger rows, tensors."""
        info = self.info(ref)
        specs, digests = self.repository.tensor_list(info)
        notes = version_notes(self.repository, [info]).get(info.snapshot_id, VersionNotes())
        return {
            **version_line(info),
            **notes.to_json(),
            "branch": info.branch,
            "written_at": info.written_at,
            "parent_snapshot_id": info.parent_snapshot_id,
            "codec": info.codec,
            "anchor_version": info.anchor_version,
            "state_version": info.state_version,
            "state_digest": info.state_digest,
            "attributes": dict(info.attributes),
            "ledger": self.ledger(info),
            "tensors": [{**spec.to_json(), "digest": digests[spec.name]} for spec in specs],
        }

    def ledger(self, info: CommitInfo) -> list[Json]:
        """Rows of the groups a version closed; none for v0."""
        return ledger_rows(self.repository, info)

    def show_group(self, group_id: str) -> Json:
        """A group's ledger row, the version that closed it, and its rollouts.

        `rollouts` are as trained, `left_out` the others with the reason as `outcome`; their
        `text`, and `prompt`, are None where the model's tokenizer is not at hand. `trained_by`
        lists the versions whose batch holds the group, `token_versions` those that produced its
        trained tokens.

        Raises `RunError` for a group no stored version mentions.
        """
        step = group_id.partition("/")[0]
        if step.isdigit():
            for info, row in self._rows_from(int(step)):
                if row["group_id"] == group_id:
                    return {"version": info.version, "row": row, **self._group(info, group_id)}
        raise RunError(
            f"no version of {self.repository.location} has a group {group_id!r}.",
            code=RunErrorCode.RUN_NOT_FOUND,
            remedy="Groups are named step/index; `deltaloom show VERSION` lists them.",
        )

    def _rows_from(self, step: int) -> Iterator[tuple[CommitInfo, Json]]:
        """Ledger rows from a version on: a late group is in a later one than its step."""
        head = self.repository.find_head(self.branch)
        for version in range(step, head.version + 1 if head else 0):
            info = self.info(str(version))
            for row in self.ledger(info):
                yield info, row

    def diff(self, first: str, second: str, codecs: Mapping[str, DeltaCodec]) -> Json:
        """What changed from one version to another: elements by tensor, reward, ledger rows."""
        before, after = self.info(first), self.info(second)
        old = self.repository.read_policy(before.snapshot_id, codecs)
        new = self.repository.read_policy(after.snapshot_id, codecs)
        tensors = compare_tensors(old, new)
        return {
            "from": version_line(before),
            "to": version_line(after),
            "changed": sum(row["changed"] for row in tensors),
            "elements": sum(row["elements"] for row in tensors),
            "reward_change": _change(before, after, "reward"),
            "tensors": tensors,
            "ledger_rows": self._rows_between(before, after),
        }

    def _rows_between(self, before: CommitInfo, after: CommitInfo) -> list[Json]:
        low, high = sorted((before.version, after.version))
        return [
            {"version": version, **row}
            for version in range(low + 1, high + 1)
            for row in self.ledger(self.repository.info(version, branch=self.branch))
        ]

    def _group(self, info: CommitInfo, group_id: str) -> Json:
        """What `show_group` says of a group beside its row."""
        from .stored_rollouts import stored_groups

        (group,) = [g for g in stored_groups(self.repository, info) if g.id == group_id]
        tokenizer = self.tokenizer()
        lines = [rollout_line(rollout, tokenizer) for rollout in group.rollouts]
        trained = [line for line in lines if not line["outcome"] and line["tokens"]]
        return {
            "trained_by": [info.version] if trained else [],
            "token_versions": sorted({v for line in trained for v in line["versions"]}),
            "prompt": _text(group.prompt_tokens, tokenizer),
            "answer": group.answer,
            "rollouts": trained,
            "left_out": [line for line in lines if line["outcome"]],
        }

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run's model; None where its plugin is not at hand."""
        from .plugin_manager import create_plugins
        from .stored_rollouts import tokenizer_of

        return tokenizer_of(self.config, create_plugins(plugins_dir=self.plugins_dir))


class StoredRun(StoredBranch):
    """A branch of a run opened for reading; by default the current one."""

    def __init__(self, path: Path | str, *, branch: str | None = None) -> None:
        """Raises `RunError` if there is no such run or branch."""
        run_dir, manifest = open_run(Path(path))
        branch = branch or manifest.branch
        self.manifest: RunManifest = manifest.on_branch(branch)
        self.run_dir = RunDir(run_dir.path, branch)
        directory = manifest.plugins_dir
        super().__init__(
            PolicyRepository.open(manifest.store_url, read_only=True),
            branch,
            config=read_config(self.run_dir),
            plugins_dir=Path(directory) if directory else None,
        )

    def status(self) -> Json:
        """Where the run stands: head, accounting, last metrics, whether a driver holds it."""
        head = self.repository.find_head(self.branch)
        accounting = accounting_from_json(head.attributes["accounting"]) if head else Accounting()
        live = live_accounting(self.run_dir.metrics_file, head)
        steps = self.config["pipeline"]["steps"]
        version = head.version if head else -1
        infos = self.repository.log(self.branch) if head else []
        notes = version_notes(self.repository, infos)
        return {
            "run_dir": str(self.run_dir.path),
            "store": self.manifest.store_url,
            "branch": self.branch,
            "branches": list(self.manifest.branches),
            "version": version,
            "snapshot_id": head.snapshot_id if head else "",
            "steps": steps,
            "finished": version >= steps,
            "accounting": (live or accounting).to_json(),
            "closed": (live or accounting).is_closed,
            "accounting_line": (live or accounting).line(),
            "metrics": dict(head.attributes["metrics"]) if head else {},
            "evaluations": newest_evaluations(infos, notes),
            "guard": [*all_findings(infos, notes)],
        }


def _last_at_work(run: Path) -> float:
    """When one of a run's own files was last written: a resumed run is newer than it began."""
    files = (run, *run.glob("*.json*"), *run.glob("branches/*/*.json*"))
    return max(path.stat().st_mtime for path in files)


def first_config(repository: PolicyRepository, branch: str) -> Mapping[str, Any]:
    """The options that version 0 of a branch has recorded; none where it is gone or has none."""
    try:
        config: Mapping[str, Any] = repository.info(0, branch=branch).attributes.get("config", {})
    except NotFoundError:
        return {}
    return config


def live_accounting(metrics_file: Path, head: CommitInfo | None) -> Accounting | None:
    """In flight and buffered rollouts as of the last line a running driver wrote, None where
    that line is not of the head."""
    last = last_json_line(metrics_file)
    if last is None or head is None or last.get("version") != head.version:
        return None
    names = ("dispatched", "trained", "dropped", "invalid", "in_flight", "buffered")
    reasons = head.attributes["accounting"]["reasons"]
    return accounting_from_json(
        {**{name: last[f"rollouts_{name}"] for name in names}, "reasons": reasons}
    )


def ledger_rows(repository: PolicyRepository, info: CommitInfo) -> list[Json]:
    """Rows of the groups a version closed; none for v0."""
    if "ledger" not in info.record.tables:
        return []
    values, arrays = repository.read_table(info.snapshot_id, "ledger")
    return [
        {
            **{name: column[row] for name, column in values.items()},
            **{name: _plain(column[row]) for name, column in arrays.items()},
        }
        for row in range(len(values["group_id"]))
    ]


def version_line(info: CommitInfo) -> Json:
    """One version in short."""
    metrics = info.attributes.get("metrics", {})
    return {
        "version": info.version,
        "snapshot_id": info.snapshot_id,
        "is_anchor": info.is_anchor,
        "weight_bytes": info.weight_bytes,
        "dense_bytes": info.dense_bytes,
        "changed": info.num_changed,
        "elements": info.num_elements,
        "reward": metrics.get("reward"),
        "staleness": metrics.get("staleness"),
    }


def rollout_line(rollout: StoredRollout, tokenizer: Tokenizer | None) -> Json:
    """One rollout: text, tokens with their versions, reward, and advantage or why it has none."""
    tokens: list[int] = rollout.tokens.tolist()
    advantages = rollout.advantages
    return {
        "at": rollout.at,
        "text": _text(rollout.tokens, tokenizer),
        "tokens": tokens,
        "reward": _plain(np.float64(rollout.reward)),
        "advantage": float(advantages[-1]) if advantages is not None and tokens else None,
        "versions": rollout.versions.tolist(),
        "outcome": rollout.outcome,
    }


def _text(tokens: npt.NDArray[Any], tokenizer: Tokenizer | None) -> str | None:
    return tokenizer.decode(tokens.tolist()) if tokenizer else None


def compare_tensors(old: PolicyTensors, new: PolicyTensors) -> list[Json]:
    """Changed elements of each tensor, by bits. A tensor on one side alone counts as changed."""
    names = {spec.name: spec for spec in (*old.specs, *new.specs)}
    rows = []
    for name, spec in sorted(names.items()):
        before, after = old.bits.get(name), new.bits.get(name)
        if before is None or after is None or before.shape != after.shape:
            changed = spec.num_elements
        else:
            changed = int(np.count_nonzero(before != after))
        rows.append(
            {
                "tensor": name,
                "elements": spec.num_elements,
                "changed": changed,
                "fraction": changed / spec.num_elements if spec.num_elements else 0.0,
            }
        )
    return rows


def last_json_line(path: Path) -> Json | None:
    """The last whole line of a JSON-lines file; None if there is none."""
    if not path.is_file():
        return None
    lines: Sequence[str] = path.read_text(encoding="utf-8").splitlines()
    for line in reversed(lines):
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        return value if isinstance(value, dict) else None
    return None


def _change(before: CommitInfo, after: CommitInfo, metric: str) -> float | None:
    old = before.attributes["metrics"].get(metric)
    new = after.attributes["metrics"].get(metric)
    return None if old is None or new is None else new - old


def _plain(value: Any) -> Any:
    item = value.item()
    return None if isinstance(item, float) and not np.isfinite(item) else item
