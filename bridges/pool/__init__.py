"""Judges in actors of a Ray cluster: the queue of a pool, what stands in for a judge, pictures in the object store."""
