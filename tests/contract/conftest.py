"""Lets a failing clause of the contract show its values."""

import pytest

pytest.register_assert_rewrite("stores.contract")
