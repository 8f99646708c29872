"""Recommendation: from a user's history to a query for the next item.

The policy reads a history of titles and writes a query; a retriever ranks the whole catalogue against that
text; rewards and measures are functions of the rank of the item that came next.
"""

FUSED, RANK = "fused", "rank"
"""Always watched, last, for the tables; the first where there is a prior."""
PLACES = ("{history}", "{last}", "{items}")
"""Placeholders of a template; one of them at least."""
EVENT_COLUMNS = ("user_id", "item_id", "timestamp")
"""Columns of a CSV of events."""
