"""Inter-stage fusion: start inference of finished samples while the long tail still generates.

Generation instances decode their samples together; when no more than R_t samples are left over
all instances, the survivors migrate once to m instances and the others turn to the inference
(reference, reward, critic) of finished samples. The formulas reconstruct RLHFuse (arXiv
2409.13221, section on data-aware inter-stage fusion):

    m(R)        = min(G, max(ceil(R / BS_max), ceil(KV need / KV capacity)))
    T_serial    = T_generation + n * c / G
    T_fused(R)  = t_trigger + pause + T_tail(m) + inference left over / G

Inference work is fluid: divisible over the freed instances. Times are in seconds or any one unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...storage.errors import ErrorCode, InputError

InstanceLengths = Sequence[Sequence[int]]
"""Response lengths in tokens, one sequence a generation instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCosts:
    """What it costs a receiver to take over samples in the middle of their generation.

    The KV cache of a sample is either moved (`kv_bytes_per_token`, `bytes_per_second`) or
    rebuilt by prefill (`prefill_tokens_per_second`), whichever is faster; a way whose rate is
    zero is not available. `pause_seconds` is paid once, on top.
    """

    pause_seconds: float = 0.0
    kv_bytes_per_token: float = 0.0
    bytes_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InterStageCosts:
    """The profiled costs the simulator needs.

    `decode_step_seconds` is the time of one token for every sample of an instance, flat up to
    `max_batch` samples and proportional to the batch above it. `inference_seconds` is the work of
    one sample on one instance, all inference models together. `kv_capacity_tokens` is what one
    instance can hold (None: not binding) and `max_length_tokens` what a survivor may still
    reach, used to reserve its cache.
    """

    max_batch: int
    inference_seconds: float
    decode_step_seconds: float = 1.0
    transfer: TransferCosts = field(default_factory=TransferCosts)
    kv_capacity_tokens: int | None = None
    max_length_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.decode_step_seconds <= 0 or self.inference_seconds < 0:
            raise InputError(
                "max_batch and decode_step_seconds must be positive and inference_seconds not "
                f"negative, got {self.max_batch}, {self.decode_step_seconds} and "
                f"{self.inference_seconds}.",
                code=ErrorCode.INVALID_ARGUMENT,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOutcome:
    """One simulated step: when fusion fired, what it moved, and when everything was done.

    `num_kept` instances went on generating; with `num_kept` equal to all instances nothing was
    freed and the step ran serially.
    """

    total_seconds: float
    trigger_seconds: float
    generation_seconds: float
    num_kept: int
    num_migrated: int
    serial_seconds: float
    kept: tuple[int, ...]
    """The instances that went on generating, by index."""
    tail_ends: tuple[float, ...] = ()
    """When each survivor ended, in order."""

    @property
    def speedup(self) -> float:
        return self.serial_seconds / self.total_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    generated: int
    remaining: int


def decode_seconds(lengths: Sequence[int], costs: InterStageCosts) -> list[float]:
    """When each sample of one instance ends if all start together; in the order given."""
    ends = [0.0] * len(lengths)
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    now, reached = 0.0, 0
    for finished, index in enumerate(order):
        active = len(lengths) - finished
        now += (lengths[index] - reached) * _step_seconds(active, costs)
        reached = lengths[index]
        ends[index] = now
    return ends


def serial_seconds(lengths: InstanceLengths, costs: InterStageCosts) -> float:
    """Generation to the end, then inference spread over all instances."""
    _check_lengths(lengths)
    generation = max((max(decode_seconds(own, costs), default=0.0) for own in lengths), default=0.0)
    return generation + _num_samples(lengths) * costs.inference_seconds / len(lengths)


def num_kept_instances(
    num_remaining: int, num_instances: int, costs: InterStageCosts, *, longest_tokens: int = 0
) -> int:
    """`m(R)`: instances that can decode the survivors without slowing down or running out of KV.

    A survivor reserves `costs.max_length_tokens`, or `longest_tokens` when that is not set.
    """
    by_batch = math.ceil(num_remaining / costs.max_batch)
    by_memory = 0
    if costs.kv_capacity_tokens is not None:
        reserved = num_remaining * (costs.max_length_tokens or longest_tokens)
        by_memory = math.ceil(reserved / costs.kv_capacity_tokens)
    return min(num_instances, max(by_batch, by_memory))


def sample_transfer_seconds(tokens: int, transfer: TransferCosts) -> float:
    """The faster of moving `tokens` of KV cache and recomputing them; 0 when neither is priced."""
    ways = []
    if transfer.bytes_per_second > 0:
        ways.append(tokens * transfer.kv_bytes_per_token / transfer.bytes_per_second)
    if transfer.prefill_tokens_per_second > 0:
        ways.append(tokens / transfer.prefill_tokens_per_second)
    return min(ways, default=0.0)


def fused_seconds(
    lengths: InstanceLengths, costs: InterStageCosts, *, threshold: int
) -> FusedOutcome:
    """Simulate one step that fuses when at most `threshold` samples remain.

    It fires once, at the first moment the count over all instances is low enough, so that
    samples that end together count together.
    """
    serial = serial_seconds(lengths, costs)
    ends = [decode_seconds(own, costs) for own in lengths]
    trigger = _trigger_seconds([end for own in ends for end in own], threshold)
    survivors = [
        _survivors(own, own_ends, trigger, costs)
        for own, own_ends in zip(lengths, ends, strict=True)
    ]
    num_remaining = sum(map(len, survivors))
    longest = max((s.generated + s.remaining for own in survivors for s in own), default=0)
    num_kept = num_kept_instances(num_remaining, len(lengths), costs, longest_tokens=longest)
    if num_kept == len(lengths):
        return _serial_outcome(ends, serial, trigger, num_kept)
    kept = kept_instances(survivors, num_kept)
    tail, num_migrated = _tail_ends(survivors, kept, trigger, costs)
    num_finished = _num_samples(lengths) - num_remaining
    total = _drain(trigger, num_finished, tail, (len(lengths) - num_kept, len(lengths)), costs)
    return FusedOutcome(
        total_seconds=total,
        trigger_seconds=trigger,
        generation_seconds=max(tail, default=trigger),
        num_kept=num_kept,
        num_migrated=num_migrated,
        serial_seconds=serial,
        kept=tuple(sorted(kept)),
        tail_ends=tuple(sorted(tail)),
    )


def inference_share(lengths: InstanceLengths, costs: InterStageCosts) -> float:
    """Inference over generation plus inference, when run serially.

    Report it beside any speedup: below about 15 % there is little left to hide.
    """
    inference = _num_samples(lengths) * costs.inference_seconds / len(lengths)
    return inference / serial_seconds(lengths, costs)


def _step_seconds(num_active: int, costs: InterStageCosts) -> float:
    return costs.decode_step_seconds * max(1.0, num_active / costs.max_batch)


def _num_samples(lengths: InstanceLengths) -> int:
    return sum(map(len, lengths))


def _trigger_seconds(ends: Sequence[float], threshold: int) -> float:
    num_to_finish = len(ends) - threshold
    return 0.0 if num_to_finish <= 0 else sorted(ends)[num_to_finish - 1]


def _survivors(
    lengths: Sequence[int], ends: Sequence[float], trigger: float, costs: InterStageCosts
) -> list[_Sample]:
    """Samples of one instance that have not ended, with the tokens they still need."""
    left = sorted(length for length, end in zip(lengths, ends, strict=True) if end > trigger)
    if not left:
        return []
    previous = max((end for end in ends if end <= trigger), default=0.0)
    reached = max(
        (length for length, end in zip(lengths, ends, strict=True) if end <= trigger), default=0
    )
    generated = reached + int((trigger - previous) / _step_seconds(len(left), costs) + 1e-9)
    return [_Sample(generated=generated, remaining=length - generated) for length in left]


def kept_instances(survivors: Sequence[Sequence[_Sample]], num_kept: int) -> list[int]:
    """The instances with the most survivors, most first; the lowest index on ties."""
    ranked = sorted(range(len(survivors)), key=lambda index: (-len(survivors[index]), index))
    return ranked[:num_kept]


def _tail_ends(
    survivors: Sequence[Sequence[_Sample]],
    stay: Sequence[int],
    trigger: float,
    costs: InterStageCosts,
) -> tuple[list[float], int]:
    """When each survivor ends, and how many of them moved.

    A moved sample goes to the receiver with the fewest. If any moved, the whole tail pauses
    once, as long as the slowest receiver needs.
    """
    kept = [list(survivors[index]) for index in stay]
    ranked = kept_instances(survivors, len(survivors))
    moved = [sample for index in ranked[len(stay) :] for sample in survivors[index]]
    transfers = [0.0] * len(kept)
    for sample in moved:
        receiver = min(range(len(kept)), key=lambda index: (len(kept[index]), index))
        kept[receiver].append(sample)
        transfers[receiver] += sample_transfer_seconds(sample.generated, costs.transfer)
    pause = costs.transfer.pause_seconds + max(transfers) if moved else 0.0
    ends = [
        trigger + pause + end
        for own in kept
        for end in decode_seconds([sample.remaining for sample in own], costs)
    ]
    return ends, len(moved)


def _drain(
    trigger: float,
    num_finished: int,
    tail_ends: Sequence[float],
    instances: tuple[int, int],
    costs: InterStageCosts,
) -> float:
    """Run inference on the freed instances until the tail ends, the rest on all of them."""
    num_freed, num_instances = instances
    now, work = trigger, num_finished * costs.inference_seconds
    for end in sorted(tail_ends):
        work = max(0.0, work - num_freed * (end - now)) + costs.inference_seconds
        now = end
    return now + work / num_instances


def _serial_outcome(
    ends: Sequence[Sequence[float]], serial: float, trigger: float, num_kept: int
) -> FusedOutcome:
    return FusedOutcome(
        total_seconds=serial,
        trigger_seconds=trigger,
        generation_seconds=max((end for own in ends for end in own), default=0.0),
        num_kept=num_kept,
        num_migrated=0,
        serial_seconds=serial,
        kept=tuple(range(num_kept)),
        tail_ends=(),
    )


def _check_lengths(lengths: InstanceLengths) -> None:
    if not lengths or not _num_samples(lengths):
        raise InputError(
            "lengths must hold at least one instance with one sample.",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    if min(length for own in lengths for length in own) < 1:
        raise InputError(
            "every response must be at least one token long.", code=ErrorCode.INVALID_ARGUMENT
        )
