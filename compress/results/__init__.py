"""Results as values: of one model, of several, and of a run. Nothing here imports torch."""
