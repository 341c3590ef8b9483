"""The records of an answer as columns, without a dictionary for each."""


class RowColumns:
    """The records of an answer, as columns of the same length.

    datas    their data
    numbers  their sequence numbers
    keys     their partition keys; None where the stream has none
    arrived  their times, as the service tells them; None where it does not
    sealed   whether any begins as an aggregate does
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.datas: list[bytes] = []
        self.numbers: list[str] = []
        self.keys: list[str | None] = []
        self.arrived: list[object] = []
        self.sealed = False

    def __len__(self) -> int:
        return len(self.datas)

    def __getitem__(self, at: int) -> dict[str, object]:
        """A record, as boto3 has it."""
        row: dict[str, object] = {"Data": self.datas[at], "SequenceNumber": self.numbers[at]}
        row["PartitionKey"], row["ApproximateArrivalTimestamp"] = self.keys[at], self.arrived[at]
        return row
