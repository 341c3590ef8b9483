"""Tests that our packages contain every file of the repository, and a README whose links work on an index."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from hatch_build import RELATIVE_LINK, index_readme

ROOT = Path(__file__).parents[1]
ALWAYS_PACKED = {".gitignore", "LICENSE", "hatch_build.py", "pyproject.toml"}
LINKS_TO_FOLDERS = {"adapters", "balancer", "stores"}


def test_source_distribution_has_every_top_level_entry() -> None:
    """Every tracked file and folder is packed, so that tests and site can be run from the source distribution."""
    git_result = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if git_result.returncode:
        pytest.skip("this is no checkout of git")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packed_entries = project["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    entries = {path.partition("/")[0] for path in git_result.stdout.splitlines() if (ROOT / path).exists()}
    assert entries - LINKS_TO_FOLDERS == {*packed_entries, *ALWAYS_PACKED}


def test_two_distributions_share_and_require_one_version() -> None:
    """The extras install the laboratory of the same version, with its extra of the same name."""
    product, laboratory = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (".", "lab")
    )
    version = product["version"]
    assert (laboratory["version"], laboratory["dependencies"]) == (version, [f"leasehold=={version}"])
    extras = laboratory["optional-dependencies"]
    assert {extra: product["optional-dependencies"][extra] for extra in extras} == {
        extra: [f"leasehold-lab[{extra}]=={version}"] for extra in extras
    }
    assert (ROOT / "lab" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_index_readme_has_no_relative_link() -> None:
    """If the repository has an address, relative links become absolute. Otherwise, they become plain words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert RELATIVE_LINK.search(text)
    for repository in ("", "https://example.com/leasehold"):
        assert RELATIVE_LINK.findall(index_readme(text, repository)) == []
    assert index_readme("[start](docs/start.md), [SQL](https://x.y)", "") == "start, [SQL](https://x.y)"
    absolute = index_readme("[start](docs/start.md)", "https://example.com/leasehold")
    assert absolute == "[start](https://example.com/leasehold/blob/main/docs/start.md)"
    assert index_readme("![a crash](kill.svg)", "") == "a crash"
