"""Data sets and loaders. Import the modules."""
