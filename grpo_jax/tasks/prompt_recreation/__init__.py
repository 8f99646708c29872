"""Prompt recreation: the words that make a text-to-image model draw a given picture again."""
