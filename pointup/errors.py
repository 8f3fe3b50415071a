"""Errors that a user can fix. Each message is one line that names file or value and the remedy."""

import re

# "CUDA error: out of memory", "Triton Error [CUDA]: out of memory", CUBLAS_STATUS_ALLOC_FAILED.
OUT_OF_MEMORY = re.compile(r"\bout of memory\b|_STATUS_ALLOC_FAILED\b", re.IGNORECASE)
"""Matches the message of an out-of-memory error of torch's allocator, the driver or a library."""


class PointupError(Exception):
    """Base class of all errors that pointup raises on purpose."""


class FileError(PointupError):
    """A file can't be read or written."""


class NoPointsError(FileError):
    """A file is sound and has no points, or there are none to write to it."""


class BusyError(FileError):
    """Another process works on a file."""


class DataError(PointupError):
    """The content of a cloud or of a dataset can't be used."""


class NonFiniteError(DataError, ValueError):
    """Points of a neighbour search have coordinates that are not finite."""


class ConfigError(PointupError):
    """An option, or a combination of options, is invalid here."""


class ModelError(PointupError):
    """A directory or Hub repository contains no model that this version can load."""


class TrainingError(PointupError):
    """Training can't continue."""
