"""Downloads the real MultiLangDaemon, and the libraries of the KCL that record processors use."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from leasehold.adapters.toolchain import ServiceError, fill_once
from leasehold_lab.standins.node import find_node, install_packages

KCLPY = "amazon_kclpy==3.1.3 --hash=sha256:146bf4a85c79eb6d3c842075d7fe2a1ffad3f2944c24db202add5e2a875259c9"
"""The requirement for the source archive. Installing the package would also download jars, which tests do not need."""
REPOSITORIES = "https://github.com/awslabs"
"""Where the samples for Node and Ruby are, as their packages have none. LEASEHOLD_KCL_REPOSITORIES overrides it."""
NODE_REPOSITORY, RUBY_REPOSITORY = "amazon-kinesis-client-nodejs", "amazon-kinesis-client-ruby"
COMMITS = {
    NODE_REPOSITORY: "800c210fa491d60da152c1f2dd73fa7c4753553e",
    RUBY_REPOSITORY: "abe69f4df6108d111b89ae66c53d7b8b3792ce3a",
}
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
NODE_TREE = Path(__file__).parents[1] / "javascript" / "multilang"


def kclpy() -> Path:
    """Return the folder with the package `amazon_kclpy`, its `samples` and its `test`. Raises ServiceError."""

    def download(folder: Path) -> None:
        requirements_file = folder / "wanted.txt"
        requirements_file.write_text(KCLPY)
        sources = (
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
            "--require-hashes",
            "-r",
            str(requirements_file),
        )
        command = (sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", *sources)
        completed = subprocess.run((*command, "-d", str(folder)), capture_output=True, text=True, check=False)
        if completed.returncode:
            raise ServiceError(f"amazon_kclpy cannot be fetched: {completed.stderr[-300:]}")
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        # The sample is started by its name through the PATH, as if the library were installed.
        (folder / "amazon_kclpy-3.1.3" / "samples" / "sample_kclpy_app.py").chmod(0o755)

    return fill_once(f"kclpy/{hashlib.sha256(KCLPY.encode()).hexdigest()[:12]}", download) / "amazon_kclpy-3.1.3"


def kclpy_environment() -> dict[str, str]:
    """Return the environment in which this Python runs a sample of amazon_kclpy. Raises ServiceError."""
    folder = kclpy()
    return {"PYTHONPATH": str(folder), "PATH": f"{folder / 'samples'}{os.pathsep}{PATH}"}


def node_processor() -> str:
    """Return the command line of a record processor that uses aws-kcl. Raises ServiceError."""
    node = find_node()

    def install(folder: Path) -> None:
        install_packages(NODE_TREE, folder)
        shutil.copy(NODE_TREE / "processor.cjs", folder)  # next to the packages, where Node looks for them

    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(NODE_TREE.iterdir()))).hexdigest()[:12]
    return " ".join((*node.node, str(fill_once(f"javascript/multilang-{digest}", install) / "processor.cjs")))


def _clone(folder: Path, name: str) -> None:
    """Clone one of the KCL's repositories into a folder, at the tested commit. Raises ServiceError."""
    folder.mkdir(exist_ok=True)
    source = f"{os.environ.get('LEASEHOLD_KCL_REPOSITORIES', REPOSITORIES)}/{name}"
    try:
        for step in (
            ("init", "-q"),
            ("fetch", "-q", "--depth", "1", source, COMMITS[name]),
            ("checkout", "-q", "FETCH_HEAD"),
        ):
            subprocess.run(("git", "-C", str(folder), *step), capture_output=True, text=True, check=True, timeout=300)
    except (subprocess.SubprocessError, OSError) as fault:
        reason = str(getattr(fault, "stderr", None) or fault)[-300:]
        raise ServiceError(f"{name} cannot be had: {reason}; see LEASEHOLD_KCL_REPOSITORIES") from fault


def node_sample() -> tuple[Path, str]:
    """Return the folder of aws-kcl's basic sample from its repository, and the PATH with Node. Raises ServiceError."""
    node = find_node()

    def install_and_clone(folder: Path) -> None:
        install_packages(NODE_TREE, folder)  # the logging library, in a folder where the sample finds it
        _clone(folder / "repository", NODE_REPOSITORY)

    folder = fill_once(f"javascript/aws-kcl-{COMMITS[NODE_REPOSITORY][:12]}", install_and_clone)
    path = f"{Path(node.node[0]).parent}{os.pathsep}{PATH}"
    return folder / "repository" / "samples" / "basic_sample" / "consumer", path


def ruby_sample() -> tuple[Path, dict[str, str]]:
    """Return the folder of aws-kclrb's sample, and the environment in which it runs. Raises ServiceError."""
    ruby = shutil.which("ruby")
    if (
        ruby is None
        or subprocess.run((ruby, "-e", "require 'multi_json'"), capture_output=True, check=False).returncode
    ):
        raise ServiceError("no ruby on the PATH, or none with the gem multi_json")
    folder = fill_once(
        f"ruby/aws-kclrb-{COMMITS[RUBY_REPOSITORY][:12]}", lambda folder: _clone(folder / "repository", RUBY_REPOSITORY)
    )
    samples, library = folder / "repository" / "samples", folder / "repository" / "lib"
    search_path = os.environ.get("RUBYLIB")
    return samples, {
        "PATH": f"{samples}{os.pathsep}{PATH}",
        "RUBYLIB": f"{library}{os.pathsep}{search_path}" if search_path else str(library),
    }


def java_daemon(*options: str) -> tuple[str, ...]:
    """Return the MultiLangDaemon's command line up to its file, with these JVM options. Raises ServiceError."""
    if missing_tools := [tool for tool in ("java", "mvn") if shutil.which(tool) is None]:
        raise ServiceError(f"no {', no '.join(missing_tools)} on the PATH")
    pom_path = Path(__file__).parents[1] / "java" / "multilang" / "pom.xml"

    def fetch_jars(folder: Path) -> None:
        fetch_command = (
            "mvn",
            "-q",
            "-B",
            "-f",
            str(pom_path),
            "dependency:copy-dependencies",
            f"-DoutputDirectory={folder}/jars",
        )
        completed = subprocess.run(fetch_command, capture_output=True, text=True, check=False)
        if completed.returncode:
            raise ServiceError(f"the MultiLangDaemon cannot be fetched: {completed.stdout[-300:]}")

    folder = fill_once(f"java/multilang-{hashlib.sha256(pom_path.read_bytes()).hexdigest()[:12]}", fetch_jars)
    return (
        str(shutil.which("java")),
        *options,
        "-cp",
        f"{folder}/jars/*",
        "software.amazon.kinesis.multilang.MultiLangDaemon",
    )
