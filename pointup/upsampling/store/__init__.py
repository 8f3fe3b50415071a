"""The points of a cloud on disk, in spatial order, and searches in parts of it."""
