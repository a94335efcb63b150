"""Stages of a pipeline: their step, their mail, their programs and their module."""
