"""How a model is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How a model is spread over `num_ranks` processes."""

    num_ranks: int
    tensor_parallel: int
    """Ranks that share each layer's matrices; the others share rows of all weights (FSDP2)."""
    compute_dtype: str
    """What weights are rounded to for forward and backward; masters stay float32."""
    gradient_checkpointing: bool = False
    """Whether a layer's activations are computed again in the backward pass."""

    @property
    def num_data_ranks(self) -> int:
        """How many parts a batch is cut into."""
        return self.num_ranks // self.tensor_parallel

    def data_rank(self, rank: int) -> int:
        """The part of the batch that a rank computes."""
        return rank // self.tensor_parallel
