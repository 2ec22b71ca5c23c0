"""Recipes: the frozen value, its YAML form, and the order of its passes."""
