"""Options of trainer `async-pipeline`; light, so that listing plugins stays cheap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...orchestrator.config import option
from ...orchestrator.errors import ConfigError, RunErrorCode
from .._options import FloatDtype, require


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPipelineConfig:
    """How the model is cut and a batch becomes updates. Raises `ConfigError` for what cannot be."""

    num_stages: int = 2
    """Stages of whole layers."""
    stages: Literal["threads", "processes", "monarch"] = option("threads", decides="nothing")
    """Where stages live: threads of the trainer, processes beside it, or actors of a Monarch mesh.
    No bit depends on it where hosts compute alike."""
    hosts: tuple[str, ...] = option((), decides="nothing")
    """Addresses `tcp://HOST:PORT` of Monarch workers whose hosts run equal numbers of stages, for
    `stages="monarch"`; none: this host runs all. Connections are not encrypted."""
    driver_address: str = option("", decides="nothing")
    """`tcp://HOST:PORT` at which those hosts reach the trainer; wanted with `hosts`."""
    pipeline_schedule: Literal["async-1f1b", "1f1b", "gpipe"] = "async-1f1b"
    """"1f1b" and "gpipe" flush the pipeline at every update: no gradient is stale."""
    updates_per_step: int = 1
    """Updates a batch is cut into, fewer for a batch of fewer rollouts. With more than one, the
    logprobs of the policy before the first (`old` in decoupled losses) cost one more forward."""
    micro_batches_per_update: int = 4
    """Micro-batches accumulated for one update of each stage."""
    stash: bool = True
    """Backward with the weights of the forward; False: with the newest ones."""
    drain_each_step: bool = False
    """Finish what is in flight before a version is published. Without it micro-batches stay in
    flight from step to step, and the stages of a version have had different numbers of updates."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 never scales."""
    clip: Literal["stage", "global"] = "stage"
    """Whose norm is limited; "global" needs a synchronous schedule."""
    first_stage_lr: float = 1.0
    """Learning rate of the first stage as a share of the optimizer's, which is that of the last
    stage; linear in between (arXiv 2505.01099 without a stash)."""
    first_stage_momentum: float = 0.0
    """Momentum (or beta1) of the first stage, linear to the optimizer's at the last; 0: its own."""
    deadline_seconds: float = option(600.0, decides="nothing")
    """Longest one stage may wait for another, and the trainer for an answer between steps. A stage
    that nobody waits for may be at one operation for twice as long."""
    policy_dtype: FloatDtype = "bfloat16"
    """The dtype policies are published in; masters stay float32."""

    def __post_init__(self) -> None:
        for name in ("num_stages", "updates_per_step", "micro_batches_per_update"):
            got = getattr(self, name)
            require(got >= 1, option=name, expected="at least 1", got=got)
        norm, lr, momentum = self.max_grad_norm, self.first_stage_lr, self.first_stage_momentum
        require(norm >= 0, option="max_grad_norm", expected=">= 0", got=norm)
        require(0 < lr <= 1, option="first_stage_lr", expected="in (0, 1]", got=lr)
        require(
            0 <= momentum < 1, option="first_stage_momentum", expected="in [0, 1)", got=momentum
        )
        self._check_hosts()
        if not self.stash and not self.drain_each_step and self.num_stages > 1:
            raise ConfigError(
                "drain_each_step must be true with stash=false, got false: micro-batches in flight "
                "could not be restored without the weights of their forward.",
                code=RunErrorCode.WRONG_TYPE,
            )

    def _check_hosts(self) -> None:
        """Refuse hosts that nothing runs on, or unequally many stages."""
        count = len(self.hosts)
        require(
            not count or self.stages == "monarch",
            option="stages",
            expected="'monarch' with hosts",
            got=self.stages,
        )
        require(
            not count or self.num_stages % count == 0,
            option="num_stages",
            expected=f"a multiple of the {count} hosts",
            got=self.num_stages,
        )
        require(
            bool(self.driver_address) == bool(count),
            option="driver_address",
            expected="tcp://HOST:PORT with hosts, else nothing",
            got=self.driver_address,
        )
