"""Seeds: every random decision of a run is a function of the run's seed and what it is for."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """A 64-bit seed for the thing named by `parts` (node, step, ...) of a run.

    BLAKE2b of the parts, so that neighbours are unrelated and platforms agree.
    """
    text = "\0".join(str(part) for part in (run_seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def rollout_seeds(
    run_seed: int, *, node: str, step: int, first_prompt: int, num_prompts: int, group_size: int
) -> npt.NDArray[np.uint64]:
    """Seeds [num_prompts, group_size] of the rollouts of some of a step's prompts.

    They depend on a prompt's position in the step, not on how the step is cut into tasks.
    """
    return np.array(
        [
            [derive_seed(run_seed, node, step, prompt, member) for member in range(group_size)]
            for prompt in range(first_prompt, first_prompt + num_prompts)
        ],
        dtype=np.uint64,
    ).reshape(num_prompts, group_size)
