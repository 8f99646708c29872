"""Recommendation: from a user's history to a query for the next item.

The policy reads a history of titles and writes what to look for; a retriever ranks the whole catalogue against that
text; rewards and measures are functions of the rank of the item that came next.
"""
