"""`titan`: models on a Monarch mesh of ranks, cut by FSDP2; torchtitan's own with tensor
parallelism too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...orchestrator.config import option
from ...orchestrator.errors import ConfigError, RunError, RunErrorCode
from ...orchestrator.hookspecs import hookimpl
from ...orchestrator.shared_publishing import ShareTarget
from ...orchestrator.types import FloatArray, TrainBatch, TrainerState
from .._options import require
from ..titan_support.names import DecayType
from .torch_trainer import TorchTrainer, TorchTrainerConfig

if TYPE_CHECKING:
    import icechunk

    from ...storage.bits import PolicyTensors, TensorSpec
    from ...storage.offers import Address
    from ...storage.records import CommitInfo
    from ...storage.sharded_publisher import ShardReport, ShardTicket
    from ...storage.shares import Shares
    from ..titan_support.mesh import RankMesh
    from ..titan_support.rank import Identity, PassResult, RankSetup
    from ..titan_support.state import Place
    from ..torch_support.metrics import MetricSums


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanTrainerConfig(TorchTrainerConfig):
    """Options of the torch trainer, the mesh, and torchtitan's schedule. Raises `ConfigError`."""

    num_ranks: int = option(2, decides="rounding")
    """Processes of the mesh. A run that goes on with another number is a branch: it rounds
    otherwise."""
    tensor_parallel: int = option(1, decides="rounding")
    """Ranks that share each layer's matrices; divides `num_ranks`. The rest is FSDP2's."""
    hosts: tuple[str, ...] = option((), decides="nothing")
    """Addresses `tcp://HOST:PORT` of Monarch workers whose hosts run equal numbers of ranks;
    none: this host runs all. Connections are not encrypted."""
    driver_address: str = option("", decides="nothing")
    """`tcp://HOST:PORT` at which those hosts reach the driver; wanted with `hosts`."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What FSDP2 gathers weights as for forward and backward."""
    gradient_checkpointing: bool = option(False, decides="nothing")
    """Recompute activations in the backward pass: about a third more time, much less memory."""
    schedule_steps: int = 0
    """Optimizer steps of the learning rate's schedule; 0 keeps it constant."""
    schedule_warmup_steps: int = 0
    """Steps of linear warm-up."""
    schedule_decay_ratio: float = 0.2
    """Share of `schedule_steps` in which the learning rate falls, at the end."""
    schedule_decay: DecayType = "linear"
    """Form of the fall."""
    schedule_min_factor: float = 0.0
    """Share of the learning rate that is left after it."""
    collective_seconds: float = option(600.0, decides="nothing")
    """Longest one rank waits for another."""

    def __post_init__(self) -> None:
        TorchTrainerConfig.__post_init__(self)
        for name in ("num_ranks", "tensor_parallel"):
            got = getattr(self, name)
            require(got >= 1, option=name, expected="at least 1", got=got)
        for name in ("schedule_steps", "schedule_warmup_steps", "schedule_min_factor"):
            got = getattr(self, name)
            require(got >= 0, option=name, expected=">= 0", got=got)
        ratio, parts = self.schedule_decay_ratio, self.tensor_parallel
        require(0 <= ratio <= 1, option="schedule_decay_ratio", expected="in [0, 1]", got=ratio)
        hosts = len(self.hosts)
        require(
            hosts == 0 or self.num_ranks % hosts == 0,
            option="num_ranks",
            expected=f"a multiple of the {hosts} hosts",
            got=self.num_ranks,
        )
        require(
            bool(self.driver_address) == bool(hosts),
            option="driver_address",
            expected="tcp://HOST:PORT with hosts, else nothing",
            got=self.driver_address,
        )
        require(
            self.num_ranks % parts == 0,
            option="tensor_parallel",
            expected=f"a divisor of num_ranks={self.num_ranks}",
            got=parts,
        )


class TitanTrainer(TorchTrainer):
    """The torch trainer's steps, computed by a mesh of ranks.

    A batch is cut into equal runs of rollouts, one a data-parallel rank; gradients are summed
    over ranks, and divided by counts over the whole batch. Each rank publishes its own rows of a
    version. A step is a function of state, batch and number of ranks. A rank that dies ends the
    step with `TaskError` (RANK_LOST).
    """

    name: ClassVar[str] = "titan"
    Config: ClassVar[type[Any]] = TitanTrainerConfig

    _config: TitanTrainerConfig
    _ranks: RankMesh | None = None

    def initialize(self, *, seed: int) -> None:
        """Start fresh ranks at v0, the model's own initial weights.

        Raises `PluginError` without the extra, `ConfigError` for an algorithm with a critic and a
        model without one, and under tensor parallelism for tied embeddings and models that
        torchtitan lacks.
        """
        from .._monarch import Hosts
        from ..titan_support.mesh import RankMesh

        if self._config.tensor_parallel > 1:
            self._check_tensor_parallel()
        self._seed = seed
        self._num_updates = 0
        self.close()
        config = self._config
        hosts = Hosts(addresses=config.hosts, driver_address=config.driver_address)
        self._ranks = RankMesh(self._setup(), hosts)
        try:
            answers = self._ranks.train("initialize", seed)
        except BaseException:
            self.close()
            raise
        self._specs: tuple[TensorSpec, ...] = answers[0][0]
        self._places: list[Mapping[str, Place]] = [places for _, places in answers]

    @property
    def mesh(self) -> RankMesh:
        """The ranks. Raises `RunError` before `initialize` or `load`."""
        if self._ranks is None:
            raise RunError(
                "the trainer has no ranks yet.",
                code=RunErrorCode.RUN_MISMATCH,
                remedy="Call initialize or load first.",
            )
        return self._ranks

    @property
    def identities(self) -> Sequence[Identity]:
        """Which processes the ranks are."""
        return self.mesh.identities

    @property
    def _all_shares(self) -> Shares:
        from ...storage.shares import row_shares

        return row_shares(self._specs, num_ranks=self._config.num_ranks)

    @property
    def shares(self) -> Shares | None:
        """See `PublishesShares`."""
        return self._all_shares if self._config.num_ranks > 1 else None

    def policy(self) -> PolicyTensors:
        """The masters of all ranks rounded to `policy_dtype`, put together here, as copies."""
        from ...storage.bits import PolicyTensors

        ranks = self.mesh.train("share")
        pieces = self._all_shares.pieces
        bits = {
            spec.name: np.concatenate([ranks[p.rank].bits[spec.name] for p in pieces[spec.name]])
            for spec in self._specs
        }
        return PolicyTensors(specs=self._specs, bits=bits)

    def policy_facts(self) -> Mapping[str, Any]:
        """How many ranks the policy was trained on, and how they shared the work."""
        config = self._config
        return {"num_ranks": config.num_ranks, "tensor_parallel": config.tensor_parallel}

    def state(self) -> TrainerState:
        """Masters, moments and schedule as whole arrays, whatever the number of ranks."""
        from ..titan_support.state import join_blocks

        answers = self.mesh.train("export_state")
        own = {"seed": self._seed, "num_updates": self._num_updates}
        return TrainerState(
            arrays=join_blocks(blocks for blocks, _ in answers), values={**answers[0][1], **own}
        )

    def load(self, state: TrainerState) -> None:
        """Go on from a state saved by any number of ranks, on fresh ranks.

        Raises `RunError` naming what is missing, unknown or of another shape.
        """
        from ..titan_support.state import cut_blocks

        wanted = {"seed", "num_updates", "groups", "scalars", "schedule"}
        if missing := sorted(wanted - state.values.keys()):
            raise RunError(
                f"trainer state lacks the values {missing}.",
                code=RunErrorCode.RUN_MISMATCH,
                remedy="Load a state saved by trainer 'titan'.",
            )
        self.initialize(seed=state.values["seed"])
        for rank, places in enumerate(self._places):
            parts = cut_blocks(state.arrays, places)
            self.mesh.train_one(rank, "import_state", parts, dict(state.values))
        self._num_updates = state.values["num_updates"]

    def close(self) -> None:
        """End the ranks."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def stage(self, version: int) -> None:
        """See `PublishesShares`."""
        self.mesh.train("stage", version)

    def open_branch(self, target: ShareTarget) -> None:
        """See `PublishesShares`."""
        from ..titan_support.mesh import pickle_by_value

        pickle_by_value([target.codec, *target.codecs.values()])
        self.mesh.publish("open", target)

    def share_addresses(self) -> list[Address]:
        """See `OffersShares`."""
        return self.mesh.publish("address")

    def encode_shares(self, version: int) -> list[ShardReport]:
        """See `PublishesShares`."""
        return self.mesh.publish("encode", version)

    def write_shares(self, ticket: ShardTicket) -> list[icechunk.ForkSession]:
        """See `PublishesShares`."""
        return self.mesh.publish("write", ticket)

    def acknowledge_shares(self, info: CommitInfo) -> None:
        """See `PublishesShares`."""
        self.mesh.publish("acknowledge", info.snapshot_id)

    def rollback_shares(self) -> None:
        """See `PublishesShares`."""
        self.mesh.publish("rollback")

    def _train_pass(self, batch: TrainBatch, sums: MetricSums) -> dict[str, float]:
        """Gradients over the whole batch and one optimizer step, on all ranks."""
        from ..titan_support.work import PerRank
        from ..torch_support.micro_batches import BatchTotals

        step = batch.policy_version
        work = PerRank(self._cut(batch))
        results: list[PassResult] = self.mesh.train("train_pass", work, BatchTotals.of(batch), step)
        for result in self._of_data_ranks(results):
            sums.merge(result.sums)
        norm = results[0].grad_norm
        if not math.isfinite(norm):
            raise _nonfinite(norm, step)
        self._num_updates += 1
        return {**sums.means(), "grad_norm": norm, "learning_rate": results[0].learning_rate}

    def _batch_logprobs(self, batch: TrainBatch) -> FloatArray:
        """Logprobs [S] of the batch's tokens under the masters as they are."""
        from ..titan_support.work import PerRank

        found = self.mesh.train("logprobs", PerRank(self._cut(batch)), batch.policy_version)
        return np.concatenate(self._of_data_ranks(found))

    def _cut(self, batch: TrainBatch) -> tuple[Any, ...]:
        """Every rank's `RankWork`: runs of rollouts in order, equal ones for tensor-parallel
        ranks."""
        from ..titan_support.work import cut_batch

        parallelism = self._setup().parallelism
        parts = cut_batch(
            batch,
            num_parts=parallelism.num_data_ranks,
            num_rollouts=self._config.micro_batch_rollouts,
        )
        return tuple(parts[parallelism.data_rank(r)] for r in range(parallelism.num_ranks))

    def _of_data_ranks(self, results: Sequence[Any]) -> list[Any]:
        """One result for each part of the batch, in order."""
        return list(results[:: self._config.tensor_parallel])

    def _setup(self) -> RankSetup:
        from ..titan_support.parallelism import Parallelism
        from ..titan_support.rank import RankSetup
        from ..titan_support.schedule import LearningRate

        config, sampling = self._config, self._sampling
        return RankSetup(
            model=self._model,
            algorithm=self._algorithm,
            optimizer=self._rule,
            learning_rate=LearningRate(
                total_steps=config.schedule_steps,
                warmup_steps=config.schedule_warmup_steps,
                decay_ratio=config.schedule_decay_ratio,
                decay_type=config.schedule_decay,
                min_factor=config.schedule_min_factor,
            ),
            parallelism=Parallelism(
                num_ranks=config.num_ranks,
                tensor_parallel=config.tensor_parallel,
                compute_dtype=config.compute_dtype,
                gradient_checkpointing=config.gradient_checkpointing,
            ),
            temperature=self._temperature,
            top_p=sampling.top_p if sampling else 1.0,
            max_new_tokens=sampling.max_new_tokens if sampling else 0,
            max_grad_norm=config.max_grad_norm,
            policy_dtype=config.policy_dtype,
            num_threads=self._num_threads,
            collective_seconds=config.collective_seconds,
        )

    def _check_tensor_parallel(self) -> None:
        from ..titan_support.architecture import check_tensor_parallel
        from ..titan_support.module import is_of_torchtitan

        model: Any = self._model
        if not is_of_torchtitan(model):
            raise ConfigError(
                f"tensor_parallel must be 1 for model {model.name!r}: only torchtitan's models "
                "say how their matrices are shared.",
                code=RunErrorCode.WRONG_TYPE,
                remedy="Set tensor_parallel=1, or use model=use('titan', family='llama3', ...).",
            )
        check_tensor_parallel(model.architecture)


def _nonfinite(norm: float, step: int) -> RunError:
    return RunError(
        f"the gradient norm at policy version {step} is {norm}; no weight was changed.",
        code=RunErrorCode.NONFINITE_GRADIENT,
        remedy="Lower the learning rate, or look at the batch stored with that version.",
    )


@hookimpl
def register_trainers() -> list[type[Any]]:
    return [TitanTrainer]
