"""The block sweep: capture, observers, lockstep forward passes, the activation store, resume."""
