"""The one block loop: capture, observers, lockstep forward passes, the activation store, resume."""
