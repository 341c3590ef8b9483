"""The groups that pytest-xdist keeps in one process each."""

import pytest


@pytest.mark.xdist_group("kept")
def test_tests_of_one_group_share_a_process(request: pytest.FixtureRequest) -> None:
    """Each process would start its own Spark and services. pytest-xdist has lost its groups silently before."""
    if request.config.getoption("loadgroup", default=False):  # as processes of `make test` have it
        assert request.node.nodeid.endswith("@kept")
