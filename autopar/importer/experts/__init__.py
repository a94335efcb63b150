"""Rows sorted by expert become rows dispatched to their experts."""
