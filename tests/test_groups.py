"""The groups that pytest-xdist keeps in one process each."""

import pytest


@pytest.mark.xdist_group("kept")
def test_tests_of_one_group_share_a_process(request: pytest.FixtureRequest) -> None:
    """Each process would start a Spark and a set of services of its own: pytest-xdist lost its groups unsaid before."""
    if request.config.getoption("loadgroup", default=False):  # as processes of `make test` have it
        assert request.node.nodeid.endswith("@kept")
