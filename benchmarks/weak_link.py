"""How busy the trainer stays when rollouts sit behind a slow link:
`python -m benchmarks.weak_link --json [--quick]`.

One pipeline on a Dask worker that is (a) beside the trainer, (b) behind a link of 20 Mbit/s and
80 ms there and back, (c) behind the same link with every version published whole. The store is an
S3 server at the trainer's end. Long prompts with short answers make training cost more than
rollouts, as it does where rollouts have the machines they need. Busy is the share of the time
between the first steps and the last in which the trainer thread trains; the ratios compare (b)
and (c) with (a) of the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks._report import write_result
from benchmarks._slow_link import Link, LinkSpeed, relay, slow_link
from deltaloom.orchestrator import run_dir as run_dirs
from deltaloom.orchestrator.progress import QuietProgress
from deltaloom.orchestrator.roles import StepRecord
from deltaloom.orchestrator.run import RunRequest, prepare
from deltaloom.orchestrator.session import Session
from deltaloom.storage.repository import PolicyRepository
from tests.storage_s3 import BUCKET, CREDENTIALS, s3_server

REPOSITORY: Final = Path(__file__).resolve().parent.parent
LINK: Final = LinkSpeed(bits_per_second=20e6, delay_seconds=0.040)
WARM_UP_STEPS: Final = 3
LOCAL: Final = Link(kind="none", prefix=(), near="127.0.0.1", far="127.0.0.1", relay=None)

PIPELINE: Final = """
from deltaloom.orchestrator import Pipeline, Prompt, publish, rollout, score, source, train, use
from deltaloom.plugins.scorers.exact import position_match


def prompts(step, rng):
    texts = ["".join(rng.choices("0123456789", k=24)) for _ in range({prompts})]
    return [Prompt(text + "=", answer=text[:3]) for text in texts]


pipeline = Pipeline(
    source(prompts, to="prompts"),
    rollout("prompts", to="groups", engine="torch", group_size=4, max_new_tokens=3,
            prompts_per_task={prompts}),
    score("groups", to="scored", by=position_match),
    train("scored", lr=1e-6),
    publish(codec="context", anchor_every=1000, max_chain_ratio=1000.0, state_every=1000),
    model=use("transformer", alphabet="0123456789=", hidden_size={hidden}, num_layers={layers}),
    max_staleness=2,
    steps={steps},
)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the model and the run are."""

    hidden: int
    layers: int
    prompts: int
    steps: int


FULL: Final = Size(hidden=320, layers=6, prompts=24, steps=10)
QUICK: Final = Size(hidden=128, layers=2, prompts=8, steps=6)


@dataclass(slots=True)
class Steps(QuietProgress):
    """Remembers when each version was there, and what it cost to train."""

    moments: list[float] = field(default_factory=list)
    train_seconds: list[float] = field(default_factory=list)
    weight_bytes: list[int] = field(default_factory=list)

    def on_step(self, record: StepRecord) -> None:
        self.moments.append(time.monotonic())
        self.train_seconds.append(record.metrics.get("train_seconds", 0.0))
        self.weight_bytes.append(record.committed.weight_bytes if record.committed else 0)

    def result(self) -> dict[str, Any]:
        first = WARM_UP_STEPS - 1
        seconds = self.moments[-1] - self.moments[first]
        busy = sum(self.train_seconds[WARM_UP_STEPS:])
        return {
            "busy_share": busy / seconds,
            "seconds_a_step": seconds / (len(self.moments) - WARM_UP_STEPS),
            "train_seconds_a_step": busy / (len(self.moments) - WARM_UP_STEPS),
            "bytes_a_version": sum(self.weight_bytes[first:]) / len(self.weight_bytes[first:]),
        }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quick", action="store_true", help="a small model, a few steps")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the link is taken down
    result = measure(QUICK if options.quick else FULL)
    if not options.quick:
        write_result("weak_link", result)
    print(json.dumps(result, indent=1) if options.json else _table(result))


def measure(size: Size) -> dict[str, Any]:
    """All three cases, one after the other."""
    os.environ.update(CREDENTIALS)
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder, s3_server() as endpoint:
        home = Path(folder)

        def case(link: Link, codec: str) -> dict[str, Any]:
            return run_case(home / str(next(numbers)), size, endpoint, link=link, codec=codec)

        beside = case(LOCAL, "context")
        with slow_link(LINK) as link:
            deltas, whole = case(link, "context"), case(link, "full")
    return {
        "link": link.kind,
        "mbit_per_second": LINK.bits_per_second / 1e6,
        "round_trip_ms": LINK.delay_seconds * 2e3,
        "beside": beside,
        "behind_deltas": deltas,
        "behind_whole": whole,
        "busy_deltas_to_beside": deltas["busy_share"] / beside["busy_share"],
        "busy_whole_to_beside": whole["busy_share"] / beside["busy_share"],
    }


def run_case(home: Path, size: Size, endpoint: str, *, link: Link, codec: str) -> dict[str, Any]:
    """Run the pipeline with its worker at the far end of a link."""
    home.mkdir()
    pipeline = home / "pipeline.py"
    pipeline.write_text(
        PIPELINE.format(
            prompts=size.prompts, hidden=size.hidden, layers=size.layers, steps=size.steps
        ),
        encoding="utf-8",
    )
    port = int(endpoint.rpartition(":")[2])
    with ExitStack() as stack:
        if link.relay is not None:
            port = stack.enter_context(relay(link.relay, host=link.near, target_port=port))
        scheduler = stack.enter_context(dask_cluster(home, link))
        overlay = {
            "pipeline": {"executor": "dask"},
            "executor": {"dask": {"scheduler": scheduler}},
            "publish": {"codec": codec},
        }
        request = RunRequest(pipeline_path=pipeline, run_dir=home / "run", overlay=overlay)
        return drive(
            request,
            near=_address(endpoint, home.name),
            far=_address(f"http://{link.near}:{port}", home.name),
        )


def drive(request: RunRequest, *, near: str, far: str) -> dict[str, Any]:
    """A run whose driver and workers have different addresses for one store."""
    prepared = prepare(request)
    prepared = replace(prepared, manifest=replace(prepared.manifest, store_url=far))
    run_dirs.create(prepared.run_dir, prepared.manifest, config=prepared.pipeline.config)
    steps = Steps()
    session = Session(prepared, PolicyRepository.create(near), [steps], say=lambda line: None)
    session.start()
    return steps.result()


@contextmanager
def dask_cluster(home: Path, link: Link) -> Iterator[str]:
    """A scheduler at this end and one worker at the far one; yields the scheduler's address."""
    port = _free_port()
    address = f"tcp://{link.near}:{port}"
    common = ("--no-dashboard", "--host")
    far = ("--no-nanny", "--nthreads", "1", "--name", "far", "--memory-limit", "0")
    with (home / "dask.log").open("ab") as log:
        processes = [
            _python(log, (), "scheduler", *common, link.near, "--port", str(port)),
            _python(log, link.prefix, "worker", address, *common, link.far, *far),
        ]
        try:
            yield address
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _python(log: Any, prefix: Sequence[str], kind: str, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", f"distributed.cli.dask_{kind}", *words],
        stdout=log,
        stderr=log,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _address(endpoint: str, name: str) -> str:
    return f"s3://{BUCKET}/{name}?endpoint={endpoint}"


def _table(result: Mapping[str, Any]) -> str:
    lines = [f"link: {result['link']}, {result['mbit_per_second']:g} Mbit/s, "]
    lines[0] += f"{result['round_trip_ms']:g} ms there and back"
    for name in ("beside", "behind_deltas", "behind_whole"):
        case = result[name]
        lines.append(
            f"{name:14} trainer busy {case['busy_share']:.0%}, {case['seconds_a_step']:.2f} s a "
            f"step, {case['bytes_a_version']:,.0f} bytes a version"
        )
    lines.append(
        f"of the busy share without the link: {result['busy_deltas_to_beside']:.0%} with deltas, "
        f"{result['busy_whole_to_beside']:.0%} with whole policies"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
