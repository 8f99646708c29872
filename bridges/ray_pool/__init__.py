"""Judges in actors of a Ray cluster: the queue of a pool, proxies of judges, arrays in the object store."""
