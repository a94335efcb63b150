"""Tests mirror the packages; what several share is a module beside them."""
