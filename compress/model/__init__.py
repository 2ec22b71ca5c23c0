"""Models: opening, finding the blocks, choosing modules, structure, the compressed layer, saving and loading."""
