"""Pruning: masks, positions, scores, permutations, schedules and allocations."""
