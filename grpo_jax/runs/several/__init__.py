"""One run on several processes: process 0, the others, and the loss of one."""
