"""How a compressed layer is computed: `reference` is the oracle, `dispatch` picks the fastest kernel that can."""
