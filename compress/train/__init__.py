"""The one training loop: what is trained, what it learns from, steps with held masks, checkpoints and exact resume."""
