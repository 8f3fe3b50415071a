"""Readers and writers of files of points and meshes."""
