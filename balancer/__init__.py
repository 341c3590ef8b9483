"""The rules, as pure functions of a listing."""
