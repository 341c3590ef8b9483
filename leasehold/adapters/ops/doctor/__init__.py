"""Examines a source and a store before a fleet starts: rights, conditional writes, clocks, the table, the costs.

`attempts` uses one right at a time, and makes findings of what came of it; `dynamodb`, `objects`, `postgres`,
`embedded`, `kinesis`, `dynamodb_streams` and `event_hubs` know which rights there are. `examination` puts all in order.
"""
