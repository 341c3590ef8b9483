"""A fleet moves its lease table to another store and back as it reads. Workers and the command are killed meanwhile."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import define, field
from fed_fleet import FedFleet, run_fed_fleet
from hub_stage import Feed, HubStream, a_container, a_group, flights

from leasehold.adapters.ops.swapping import open_joined, set_direction, wait_until_known
from leasehold.stores.protocol import Store
from leasehold.stores.swap import FROM, TO, Direction, SwapStore, get_or_create_control_row, lease_place, split_version
from leasehold.stores.urls import display_name, open_store
from leasehold_lab.demo.stage import Stage
from leasehold_lab.standins.hubs.event_hubs import LocalHubs
from leasehold_lab.standins.services import AZURITE_ACCOUNT

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("fleets")]

ROWS, SETTLE_SECONDS = 2000, 60.0
SETTINGS = ("--lease-seconds", "4", "--initial-position", "TRIM_HORIZON", "--checkpoint-seconds", "0.5")


@define
class Ground:
    """A fleet with two lease tables, and the commands that move its leases between them."""

    fleet: FedFleet
    urls: tuple[str, str]
    said: Path
    commands: list["subprocess.Popen[bytes]"] = field(factory=list)

    def swap(self, *more_arguments: str) -> "subprocess.Popen[bytes]":
        command = (sys.executable, "-m", "leasehold.adapters.cli.main", "swap", *self.urls, *more_arguments)
        with self.said.open("ab") as log:
            self.commands.append(subprocess.Popen(command, stdout=log, stderr=log))
        return self.commands[-1]

    def places(self) -> list[int]:
        """Return the numbers of leases for which the old and the new table are authoritative."""
        sides = [split_version(lease)[0] for lease in self.fleet.stage.leases]
        return [sides.count(FROM), sides.count(TO)]

    def wait_for_success(self, command: "subprocess.Popen[bytes]") -> None:
        """Wait until the command has succeeded, while the fleet continues."""
        stage = self.fleet.stage
        assert stage.until(lambda: command.poll() is not None, SETTLE_SECONDS), stage.leases
        assert command.returncode == 0, self.said.read_text()


@contextmanager
def open_fleet_on_two_tables(
    kinesis_url: str, client: "KinesisClient", urls: tuple[str, str], folder: Path
) -> Iterator[Ground]:
    with closing(open_store(urls[FROM])) as source, closing(open_store(urls[TO])) as target:
        tables: tuple[Store, Store] = (source, target)
        names = (display_name(urls[FROM]), display_name(urls[TO]))
        get_or_create_control_row(tables, names)
        joined_store, settings = SwapStore(tables, names[TO]), ("--to", urls[TO], *SETTINGS)
        with run_fed_fleet(
            kinesis_url, client, joined_store, urls[FROM], settings, folder, rows=ROWS, a_tick=10
        ) as fleet:
            swapped_fleet = Ground(fleet, urls, folder / "swap.log")
            try:
                yield swapped_fleet
            finally:
                for command in swapped_fleet.commands:
                    command.kill()
                    command.wait()


def move_there_and_back(swapped_fleet: Ground) -> None:
    """Move the leases, kill a worker and the command halfway, move back, split a shard, and move all leases again."""
    stage = swapped_fleet.fleet.stage
    for worker in ("ours-1", "ours-2", "ours-3"):
        stage.join(worker)
    assert stage.until(stage.is_balanced, SETTLE_SECONDS)
    killed_command = swapped_fleet.swap()
    assert stage.until(lambda: swapped_fleet.places()[TO] > 0, SETTLE_SECONDS)
    stage.kill("ours-1")
    killed_command.kill()
    stage.join("ours-4")
    swapped_fleet.swap("--back").wait(SETTLE_SECONDS)
    assert stage.until(lambda: swapped_fleet.places() == [4, 0] and stage.is_balanced(), SETTLE_SECONDS)
    stage.split()
    last_command = swapped_fleet.swap()
    assert stage.until(lambda: swapped_fleet.places()[TO] > 0, SETTLE_SECONDS)
    stage.kill("ours-2")
    swapped_fleet.wait_for_success(last_command)
    assert stage.until(stage.is_balanced, SETTLE_SECONDS)
    assert stage.until(lambda: swapped_fleet.fleet.puts.all_seen(stage), 2 * SETTLE_SECONDS)
    stage.end()


def test_a_fleet_moves_from_dynamodb_to_sqlite_and_back(
    kinesis_url: str, kinesis_client: "KinesisClient", dynalite_url: str, tmp_path: Path
) -> None:
    urls = (f"dynamodb://swapped?region=eu-west-1&endpoint={dynalite_url}", f"sqlite://{tmp_path}/leases.db")
    _check_moves(kinesis_url, kinesis_client, urls, tmp_path)


def test_a_fleet_moves_to_layout_sessions_and_back(
    kinesis_url: str, kinesis_client: "KinesisClient", dynalite_url: str, tmp_path: Path
) -> None:
    """Layout `sessions` is different in that the row of a lease does not change while the lease is held."""
    to_url = f"dynamodb://swapped-sessions?region=eu-west-1&endpoint={dynalite_url}"
    _check_moves(
        kinesis_url,
        kinesis_client,
        (to_url.replace("swapped-sessions", "swapped-rows"), to_url.replace("?", "?layout=sessions&")),
        tmp_path,
    )


def test_a_fleet_moves_from_aws_to_azure_and_back(
    kinesis_url: str, kinesis_client: "KinesisClient", dynalite_url: str, blobs: str, tmp_path: Path
) -> None:
    """Azure's store is different in that a lease consists of three objects."""
    assert blobs
    with a_container() as container:
        to_url = f"azblob://{AZURITE_ACCOUNT}/{container}?prefix=fleet/one"
        urls = (f"dynamodb://to-azure?region=eu-west-1&endpoint={dynalite_url}", to_url)
        _check_moves(kinesis_url, kinesis_client, urls, tmp_path)


def all_in(stage: Stage, table: str) -> bool:
    """Return whether this table is authoritative for every lease."""
    return {lease_place(lease) for lease in stage.leases} == {table}


def test_owner_levels_of_a_hub_grow_while_its_leases_move(hubs: LocalHubs, dynalite_url: str, tmp_path: Path) -> None:
    """The levels must grow so that the hub lets the new owner of a lease displace the old one."""
    urls = (f"dynamodb://hub-moved?region=eu-west-1&endpoint={dynalite_url}", f"sqlite://{tmp_path}/leases.db")
    names = (display_name(urls[FROM]), display_name(urls[TO]))
    feed = Feed(HubStream(hubs, "moving", 4), flights(ROWS), 20)
    with (
        a_group(feed, tmp_path, urls[FROM], target_store=urls[TO]) as group,
        closing(open_store(urls[FROM])) as source,
        closing(open_store(urls[TO])) as target,
    ):
        tables, stage = (source, target), group.stage
        joined_store = open_joined(tables, names)
        for worker in ("ours-1", "ours-2"):
            stage.join(worker)
        assert group.settle() == [2, 2]
        epochs = [{lease.key: lease.epoch for lease in joined_store.list().leases}]
        wait_until_known(tables, joined_store, names[TO], SETTLE_SECONDS)
        directions: tuple[Direction, ...] = ("to", "from", "to")
        for direction in directions:
            set_direction(tables, direction)
            assert stage.until(partial(all_in, stage, direction.upper()), SETTLE_SECONDS), stage.leases
            epochs.append({lease.key: lease.epoch for lease in joined_store.list().leases})
        stage.kill("ours-1")
        assert group.settle() == [4]
        verdict = group.finish()
    assert (verdict.faults, verdict.produced, verdict.lost) == ((), ROWS, 0)
    assert [change for change in verdict.owner_changes if change.duplicates > change.since] == []
    for key in epochs[0]:
        epochs_of_lease = [epochs_by_key[key] for epochs_by_key in epochs]
        assert epochs_of_lease == sorted(set(epochs_of_lease)), key


def _check_moves(kinesis_url: str, client: "KinesisClient", urls: tuple[str, str], folder: Path) -> None:
    with open_fleet_on_two_tables(kinesis_url, client, urls, folder) as swapped_fleet:
        move_there_and_back(swapped_fleet)
        swapped_fleet.fleet.judged()
