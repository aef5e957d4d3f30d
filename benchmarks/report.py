"""How large the report of a long run is, and how soon it is open.

`python -m benchmarks.report [--versions 2000] [--json] [--quick]`: a made-up run of the quick
start's size (32 prompts x 16 rollouts x 5 tokens a version) with a line for every task, evaluated
every ten versions, with a warning of the guard at each. Timed are reading the run, writing the
page, and, where chromium is installed, opening it from disk until its script is done. The ratio
compares reading and writing with reading the run's log alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltaloom.orchestrator.accounting import LedgerRow
from deltaloom.orchestrator.batching import batch_to_columns, batch_values
from deltaloom.orchestrator.interfaces import Finding
from deltaloom.orchestrator.plugin_manager import create_plugins
from deltaloom.orchestrator.report.collect import ReportSource, collect
from deltaloom.orchestrator.report.page import render
from deltaloom.orchestrator.run_dir import RunDir, append_json_line
from deltaloom.orchestrator.training import ledger_table
from deltaloom.orchestrator.types import TrainBatch
from deltaloom.plugins.codecs.raw import RawCodec, RawConfig
from deltaloom.storage import CommitInfo, PolicyRepository, PolicyTensors, Publisher
from deltaloom.storage.attachments import write_attachment

from ._report import write_result

GROUPS, ROLLOUTS, TOKENS = 32, 16, 5
EVALUATED_EVERY = 10
RULE = "evaluate.score below=0.6 action=warn"
START = 1_700_000_000.0
CONFIG = {
    "pipeline": {"steps": 2000, "max_staleness": 1},
    "model": {"name": "transformer", "alphabet": "0123456789="},
}


def make_run(folder: Path, *, versions: int) -> RunDir:
    """A run directory with a store of so many versions, and its journals."""
    run_dir = RunDir(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    bits = {f"layers.{i}.mlp.weight": rng.integers(0, 9, 256, dtype=np.uint16) for i in range(4)}
    dtypes = dict.fromkeys(bits, "bfloat16")
    repository = PolicyRepository.create(run_dir.store)
    with Publisher(repository, codec=RawCodec(RawConfig())) as publisher:
        for version in range(versions + 1):
            bits = {name: array.copy() for name, array in bits.items()}
            for array in bits.values():
                array[rng.integers(0, 256, 3)] += 1
            policy = PolicyTensors.from_bits(bits, dtypes=dtypes)
            info = _publish(publisher, policy, version, rng)
            if version % EVALUATED_EVERY == 0:
                _judge(repository, info)
            if version:
                _journal(run_dir, version)
    return run_dir


def _publish(
    publisher: Publisher, policy: PolicyTensors, version: int, rng: np.random.Generator
) -> CommitInfo:
    attributes: dict[str, Any] = {"accounting": _accounting(version), "config_digest": "made-up"}
    if version == 0:
        return publisher.publish(
            policy,
            version=0,
            state=({}, {}),
            attributes={**attributes, "metrics": {}, "config": CONFIG, "environment": {}},
        )
    noise = rng.normal(size=8)
    names = ("reward", "entropy", "kl_rollout", "grad_norm", "length", "logprob_difference")
    metrics = {name: 1.0 + float(noise[at]) / 10 for at, name in enumerate(names)}
    metrics |= {"num_tokens": float(GROUPS * ROLLOUTS * TOKENS), "staleness": 1.0}
    batch = _batch(version, rng)
    return publisher.publish(
        policy,
        version=version,
        tables={
            "ledger": ledger_table(_rows(version)),
            "batch": (batch_values(batch), batch_to_columns(batch)),
            "rollouts": (
                {"answers": {}, "parts": {}, "left_out": [], "prompt_groups": []},
                {"logprob_difference": rng.normal(0, 0.05, batch.tokens.size).astype(np.float16)},
            ),
        },
        attributes={
            **attributes,
            "metrics": metrics,
            "timing": {"train_seconds": 0.2, "trained_at": START + version * 0.5},
            "changed": {"layers.mlp": 12},
        },
    )


def _judge(repository: PolicyRepository, info: CommitInfo) -> None:
    """Attach what an evaluation and the guard found."""
    interval = [0.5, 0.4, 0.6]
    result = {
        **{"version": info.version, "score": interval, "pass_at": {"1": interval, "4": interval}},
        **{"length": 5.0, "num_prompts": 64, "num_samples": 4, "num_invalid": 0, "reasons": {}},
    }
    finding = Finding(version=info.version, rule=RULE, action="warn", reason="as low as ever")
    write_attachment(repository, info, "evaluation_evaluate", result)
    write_attachment(repository, info, "guard", [finding.to_json()])


def _batch(version: int, rng: np.random.Generator) -> TrainBatch:
    rows = GROUPS * ROLLOUTS
    size = rows * TOKENS
    return TrainBatch(
        policy_version=version - 1,
        group_ids=tuple(f"{version}/{index}" for index in range(GROUPS)),
        group_index=np.repeat(np.arange(GROUPS, dtype=np.int32), ROLLOUTS),
        prompt_tokens=rng.integers(1, 12, rows * 5, dtype=np.int32),
        prompt_lengths=np.full(rows, 5, dtype=np.int32),
        tokens=rng.integers(0, 12, size, dtype=np.int32),
        lengths=np.full(rows, TOKENS, dtype=np.int32),
        mask=np.ones(size, dtype=np.uint8),
        logprobs=-rng.exponential(1.0, size).astype(np.float32),
        versions=np.full(size, max(0, version - 2), dtype=np.int32),
        advantages=rng.normal(size=size).astype(np.float32),
        rewards=rng.random(rows).astype(np.float32),
    )


def _rows(version: int) -> list[LedgerRow]:
    return [
        LedgerRow(
            group_id=f"{version}/{index}",
            step=version,
            prompt_id=f"{version}/{index}",
            num_rollouts=ROLLOUTS,
            task=f"rollout/{version}/{index // 16}",
            first_seed=index,
            stage="closed",
            trained=ROLLOUTS,
        )
        for index in range(GROUPS)
    ]


def _accounting(version: int) -> dict[str, Any]:
    number = version * GROUPS * ROLLOUTS
    names = ("dropped", "invalid", "in_flight", "buffered")
    return {"dispatched": number, "trained": number, **dict.fromkeys(names, 0), "reasons": {}}


def _journal(run_dir: RunDir, version: int) -> None:
    base = START + version * 0.5
    tasks = (
        ("source", 0, 0, -0.9, 0.01),
        ("rollout", 0, 0, -0.8, 0.3),
        ("rollout", 1, 1, -0.7, 0.3),
        ("score", 0, 0, -0.45, 0.02),
        ("score", 1, 1, -0.35, 0.02),
    )
    for role, shard, worker, start, seconds in tasks:
        line = {"task": f"{role}/{version}/{shard}", "role": role, "worker": f"local-{worker}"}
        append_json_line(run_dir.tasks_file, {**line, "time": base + start, "seconds": seconds})
    ended = {"version": version, "time": base + 0.1, "commit_seconds": 0.08}
    append_json_line(run_dir.metrics_file, ended)


def measure(folder: Path, *, versions: int) -> dict[str, Any]:
    """Figures of the report of a made-up run."""
    run_dir = make_run(folder / "run", versions=versions)
    page = folder / "report.html"
    plugins = create_plugins()

    def opened() -> PolicyRepository:
        return PolicyRepository.open(run_dir.store, read_only=True)

    def write() -> None:
        source = ReportSource(
            repository=opened(), branch="main", config=CONFIG, run_dir=run_dir, plugins=plugins
        )
        page.write_text(render([collect(source)]), encoding="utf-8")

    log_seconds = _seconds(lambda: opened().log("main"))
    write_seconds = _seconds(write)
    return {
        "versions": versions,
        "page_bytes": page.stat().st_size,
        "log_seconds": round(log_seconds, 3),
        "write_seconds": round(write_seconds, 3),
        "write_over_log": round(write_seconds / log_seconds, 2),
        "open_seconds": _open_seconds(page, folder),
    }


def _open_seconds(page: Path, folder: Path) -> list[float] | None:
    """Seconds from asking for the page to its script being done, for three fresh loads; None
    without a browser."""
    if shutil.which("chromedriver") is None:
        return None
    from tests.browser_support import chromium, open_page

    with chromium(folder / "profile") as browser:
        times = []
        for _ in range(3):
            open_page(browser, page, width=1280)
            done = browser.execute_script("return Number(document.documentElement.dataset.ms)")
            times.append(round(done / 1000, 3))
    return times


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="50 versions, kept nowhere")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), versions=50 if options.quick else options.versions)
    if not options.quick:
        write_result("report", result)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        print(f"{name:<16} {value}")


if __name__ == "__main__":
    main()
