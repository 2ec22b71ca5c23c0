"""Models: their structure, their kinds, rewrites of their shape, and the caches of attention."""
