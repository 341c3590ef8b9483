"""Examines a source and a store before a fleet starts: rights, conditional writes, clocks, the table, the costs.

`findings` are values; `recognised` and `expectations` make them of what was read, purely. `attempts` uses one right
at a time; which rights there are, `dynamodb`, `objects`, `embedded`, `kinesis` and `event_hubs` know. `examination`
puts all in order.
"""
