"""What other RL trainers (TRL, verl, prime-rl, OpenRLHF, slime) call options that exist here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "lr": ("learning_rate", "actor_lr"),
    "group_size": (
        "num_generations",
        "num_return_sequences",
        "n",
        "rollouts_per_example",
        "n_samples_per_prompt",
    ),
    "max_new_tokens": (
        "max_completion_length",
        "max_response_length",
        "response_length",
        "max_tokens",
        "generate_max_len",
    ),
    "kl_coefficient": ("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl_tau"),
    "clip_low": ("epsilon", "eps_clip", "clip_eps", "cliprange", "clip_ratio", "clip_ratio_low"),
    "clip_high": ("epsilon_high", "eps_clip_high", "clip_ratio_high"),
    "steps": ("max_steps", "total_training_steps", "num_steps", "num_rollout", "total_steps"),
    "micro_batch_rollouts": (
        "per_device_train_batch_size",
        "micro_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "batch_size",
    ),
    "prompts_per_task": ("batch_size", "rollout_batch_size", "gen_batch_size"),
    "num_passes": ("num_iterations", "ppo_epochs", "num_ppo_epochs", "mu"),
    "max_grad_norm": ("clip_grad", "grad_clip", "max_norm", "gradient_clipping"),
    "warmup_steps": ("lr_warmup_steps", "num_warmup_steps", "lr_warmup_steps_ratio"),
    "mask_truncated": ("mask_truncated_completions",),
    "aggregation": ("loss_type", "loss_agg_mode"),
    "advantage": ("scale_rewards", "norm_adv_by_std_in_grpo", "adv_estimator"),
    "objective": ("importance_sampling_level", "policy_loss"),
    "correction": ("vllm_importance_sampling_correction", "use_tis", "tis_imp_ratio_cap"),
    "max_staleness": ("max_async_level", "async_level", "max_off_policy_steps", "staleness"),
    "policy_dtype": ("bf16", "fp16", "dtype", "torch_dtype"),
    "betas": ("adam_beta1", "adam_beta2", "beta1", "beta2"),
    "eps": ("adam_epsilon", "adam_eps"),
    "state_every": ("save_steps", "save_freq", "save_interval"),
    "every": ("eval_steps", "test_freq", "eval_interval"),
    "weights": ("reward_weights",),
    "workers": ("num_workers", "rollout_num_engines"),
    "seed": ("random_seed",),
}
"""By the name here; where a name of theirs is of several of ours, the one that is known counts."""


def name_here(name: str, known: Iterable[str]) -> str | None:
    """The known option that `name` stands for elsewhere, if there is one."""
    names = set(known)
    wanted = name.lower()
    return next((o for o, others in OTHER_NAMES.items() if wanted in others and o in names), None)
