"""Open models: hub ids, folders and GGUF files, with memory-mapped weights; load compressed checkpoints."""
