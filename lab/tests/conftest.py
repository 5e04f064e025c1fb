"""Runs as they lie on disk, as for the tests of `record`."""

from tests.record.conftest import make_run as make_run
