"""Starts, resumes, validates and estimates runs, and imports into them, for commands and scripts: prints nothing."""
