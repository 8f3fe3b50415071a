"""A cloud on disk in spatial order, and exact neighbour searches in parts of it."""
