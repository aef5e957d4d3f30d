"""Human review: a sample of rollouts as a file, verdicts back into the store, agreement."""
