"""Judges in actors of a Ray cluster: the queue of a pool, what stands in for its judge, pictures in the object store."""
