"""Recommendation: write a query for the next item from a user's history.

The policy reads a history of titles and writes a query. A retriever ranks the whole catalogue for it. Rewards and
measures are functions of the next item's rank.
"""

FUSED, RANK = "fused", "rank"
"""Eval rewards for the tables, always last; the first only with a prior."""
PLACES = ("{history}", "{last}", "{items}")
"""Placeholders of a template, which needs at least one."""
EVENT_COLUMNS = ("user_id", "item_id", "timestamp")
"""Columns of a CSV of events."""
