"""Examines a source and a store before a fleet starts: rights, conditional writes, clocks, the table, and costs.

`attempts` tries one right at a time and turns the results into findings. `dynamodb`, `objects`, `postgres`, `embedded`,
`kinesis`, `dynamodb_streams` and `event_hubs` define the rights on each service. `examination` runs all checks in
order.
"""
