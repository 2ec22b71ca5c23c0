"""The one training loop: what is trained, what it is trained on, steps with held masks, checkpoints and exact resume."""
