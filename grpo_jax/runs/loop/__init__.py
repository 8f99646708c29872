"""What ends a run before its iterations are done, and who is told of it on the way."""
