"""Scripts beside the packages: clusters, install tests, and what trains the miniature."""
