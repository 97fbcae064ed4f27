"""Sharing a drafter: written as an engine loads it, linted, described in a model card, uploaded (train/share.py)."""
