"""Prompt enhancement: rewriting what people type for a text-to-image model."""
