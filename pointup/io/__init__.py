"""Readers and writers of point and mesh files."""
