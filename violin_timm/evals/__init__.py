"""Measuring what a model, or an installation, is worth: one command a module."""
