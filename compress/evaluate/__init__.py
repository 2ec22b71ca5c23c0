"""Evidence: what a model is worth, measured on the checkpoint as it was shipped."""
