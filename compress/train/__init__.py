"""The training loop: students, objectives, teachers, optimizer steps under fixed masks, checkpoints, exact resume."""
