"""Errors a user can cause and mend; each message is one line with the thing and the remedy."""


class PointupError(Exception):
    """Base of every error that pointup raises on purpose."""


class FileError(PointupError):
    """A file can't be read or written."""


class NoPointsError(FileError):
    """A file is sound and has no points."""


class DataError(PointupError):
    """The content of a cloud or of a dataset can't be used."""


class NonFiniteError(DataError, ValueError):
    """Points that are to be searched have coordinates that are not finite."""


class ConfigError(PointupError):
    """An option, or a combination of options, can't be honoured."""


class ModelError(PointupError):
    """A directory or Hub repository holds no model that this version can load."""


class TrainingError(PointupError):
    """Training can't go on."""
