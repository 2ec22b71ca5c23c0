"""Pure functions on tensors: number grids, codes, bit packing, masks, factorizations, the column sweep."""
