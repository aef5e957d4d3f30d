"""Models that look at finished rollouts: values of a critic, logprobs of a reference."""
