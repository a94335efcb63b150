"""The version, which plans name and the package's metadata reads."""

__version__ = "0.1.0"
