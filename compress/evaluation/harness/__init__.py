"""Zero-shot tasks by the evaluation harness lm-eval: loglikelihoods that share prefixes, local data, and failures."""
