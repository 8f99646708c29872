"""One run on several processes: who leads, what the others do, and what happens when one is gone."""
