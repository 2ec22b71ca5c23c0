"""Structure discovery: blocks, groups of linears, links, permutations, coupled channels, names of modules."""
