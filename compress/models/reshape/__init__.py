"""Models of the same class in another shape: configurations, widths, and the residual stream."""
