"""Tests that pytest-xdist runs each group of tests in one process."""

import pytest


@pytest.mark.xdist_group("kept")
def test_tests_of_one_group_share_a_process(request: pytest.FixtureRequest) -> None:
    """If pytest-xdist ignored groups, as it once did silently, each process would start its own Spark and services."""
    if request.config.getoption("loadgroup", default=False):  # in the processes of `make test`
        assert request.node.nodeid.endswith("@kept")
