"""Conversations as chat templates take them: reading rows, rendering, and which tokens of a rendering the target generates."""
