"""Scripts beside the packages: clusters, install tests, and the training of the miniature."""
