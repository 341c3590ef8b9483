"""Tests that the files in docs/running work, as far as they can be tried, and that their numbers are consistent."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from standins.kubernetes import KubernetesApi, tried_on_kubernetes
from typer.main import get_command

from leasehold.adapters.cli.common.supervisor import EXIT_LIMIT_SECONDS
from leasehold.adapters.cli.consume import app as consume
from leasehold.adapters.cli.steer.serve import app as serve

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "running"
CONTAINERFILE = FOLDER / "Containerfile"
UNIT = FOLDER / "leasehold-orders.service"
COMMANDS = {"consume": get_command(consume), "serve": get_command(serve)}


def parse_arguments(words: list[str]) -> dict[str, Any]:
    """Parse these arguments as the command does, and return the parameters. Raises click's error for an unknown one."""
    name, *arguments = words
    with COMMANDS[name].make_context(name, arguments) as context:
        return context.params


def objects() -> list[dict[str, Any]]:
    """Return the Kubernetes objects in the example."""
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yml").read_text()))


def pod_spec(name: str) -> dict[str, Any]:
    (deployment,) = (
        manifest for manifest in objects() if manifest["kind"] == "Deployment" and manifest["metadata"]["name"] == name
    )
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def unit_setting(key: str) -> str:
    """Return a setting of the systemd unit."""
    (settings,) = re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(settings)


def test_workers_get_the_time_that_they_need_to_drain() -> None:
    """The drain must end before the service manager kills the workers."""
    spec = pod_spec("orders-workers")
    params = parse_arguments(spec["containers"][0]["args"])
    assert spec["terminationGracePeriodSeconds"] > params["drain_seconds"] + EXIT_LIMIT_SECONDS
    unit_params = parse_arguments(unit_setting("ExecStart").split()[1:])
    assert int(unit_setting("TimeoutStopSec")) > unit_params["drain_seconds"] + EXIT_LIMIT_SECONDS
    assert (params["processes"], unit_params["processes"]) == (2, 4)


def test_probe_uses_a_host_name_that_the_page_allows() -> None:
    """The served page rejects requests for other host names."""
    container = pod_spec("orders-page")["containers"][0]
    probe = container["readinessProbe"]["httpGet"]
    params = parse_arguments(container["args"])
    assert {header["name"]: header["value"] for header in probe["httpHeaders"]} == {"Host": params["allow_host"][0]}
    assert (probe["path"], params["port"]) == ("/readyz", container["ports"][0]["containerPort"])


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Systemd ignores an unknown setting and only logs it, so the test checks its output."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("THE SYSTEMD UNIT IS NOT TRIED: there is no systemd-analyze")
    unit_path = tmp_path / UNIT.name
    # Systemd checks that the command exists, so use the command of this environment.
    unit_path.write_text(
        UNIT.read_text().replace("/opt/orders/bin/leasehold", f"{Path(sys.executable).parent}/leasehold")
    )
    result = subprocess.run(["systemd-analyze", "verify", unit_path], capture_output=True, text=True, check=False)
    unit_lines = [line for line in result.stderr.splitlines() if UNIT.name in line]
    assert (result.returncode, unit_lines) == (0, [])


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the container file, each as its keyword and its joined lines."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, arguments.strip()) for word, _, arguments in (line.partition(" ") for line in text.splitlines() if line)
    ]


def test_container_file_copies_existing_files_and_runs_the_command_directly() -> None:
    """The entry point has no shell, because a shell would not pass SIGTERM on to the command."""
    steps = instructions()
    assert [word for word, _ in steps] == (
        "FROM ARG ARG COPY RUN WORKDIR USER ENTRYPOINT CMD".split()  # noqa: SIM905  as it reads
    )
    arguments_by_keyword = dict(steps)
    lock, wheel, _ = arguments_by_keyword["COPY"].split()
    assert (ROOT / lock).exists()
    assert wheel == "dist/${WHEEL}"
    assert re.fullmatch(r"WHEEL=leasehold-\*-cp313-cp313-manylinux\*_x86_64\.whl", steps[2][1])
    assert steps[0][1].endswith("python:3.13-slim")
    assert json.loads(arguments_by_keyword["ENTRYPOINT"]) == ["leasehold"]
    assert arguments_by_keyword["USER"] != "root"


def test_container_shell_parses_and_drops_digests(tmp_path: Path) -> None:
    """The digests are dropped from the constraints. Otherwise, pip would reject the wheel that was just built."""
    run = dict(instructions())["RUN"]
    assert subprocess.run(["sh", "-n", "-c", run], check=False).returncode == 0
    (tmp_path / "requirements.lock").write_text((ROOT / "requirements.lock").read_text())
    first = run.partition("&&")[0].replace("/build/", f"{tmp_path}/")
    subprocess.run(["sh", "-c", first], check=True)
    bound = (tmp_path / "constraints.txt").read_text()
    assert re.search(r"^boto3==[\d.]+$", bound, re.MULTILINE)
    assert not re.search(r"^ *--hash|\\$", bound, re.MULTILINE)


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_the_container_file_builds(tmp_path: Path) -> None:
    builders = [name for name in ("podman", "docker") if shutil.which(name)]
    usable_builders = [
        name for name in builders if not subprocess.run([name, "info"], capture_output=True, check=False).returncode
    ]
    if not usable_builders:
        pytest.skip("THE CONTAINER FILE IS NOT BUILT: there is neither podman nor a docker that runs")
    from releasing import compiled, find_interpreters, plain  # noqa: PLC0415  not needed to skip

    (tmp_path / "dist").mkdir()
    (tmp_path / "requirements.lock").write_text((ROOT / "requirements.lock").read_text())
    sources, wheel = plain(tmp_path / "dist")
    python_path = find_interpreters().get("3.13")
    compiled_wheel = python_path and compiled(sources, "3.13", python_path, tmp_path / "dist")
    options = ["--build-arg", f"WHEEL={(compiled_wheel or wheel).name}"]
    tag = "leasehold-of-a-test"
    subprocess.run([usable_builders[0], "build", *options, "-f", CONTAINERFILE, "-t", tag, tmp_path], check=True)
    try:
        version_line = subprocess.run(
            [usable_builders[0], "run", "--rm", tag, "--version"], capture_output=True, text=True, check=True
        )
        assert version_line.stdout == "leasehold 0.1.0\n"
    finally:
        subprocess.run([usable_builders[0], "rmi", tag], check=False)


@pytest.fixture(scope="module")
def api() -> Iterator[KubernetesApi]:
    """Run the API server of an empty cluster, if the user asks for it and it is available."""
    with tried_on_kubernetes("MANIFESTS ARE") as cluster_api:
        yield cluster_api


@pytest.mark.more
@pytest.mark.services
@pytest.mark.timeout(2000)  # the API server may have to be built first
def test_kubernetes_accepts_the_manifests(api: KubernetesApi) -> None:
    """By default, Kubernetes silently drops an unknown field, and so perhaps a probe or a grace period."""
    assert [api.create(manifest) for manifest in objects()] == [(201, "")] * 4


def test_manifest_check_rejects_unknown_options() -> None:
    with pytest.raises(Exception, match="No such option: --drain-time"):
        parse_arguments([*pod_spec("orders-workers")["containers"][0]["args"], "--drain-time=3"])
