"""The project as it is shipped: what a wheel holds, which versions it asks for, what lies where."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(text)
    for text in (*PROJECT["dependencies"], *(r for e in EXTRAS.values() for r in e))
]
FOLDERS = ("port", "kernels", "reference", "harness")
AGREED = {
    *("README.md", "pyproject.toml", "Makefile", "CHANGELOG.md", "LICENSE", "NOTICE", "tests"),
    *FOLDERS,
}


def constraints() -> dict[str, Version]:
    lines = (ROOT / ".ci/constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): Version(version) for name, version in pins}


def tracked(and_new: bool = True) -> list[str]:
    """Files of the project, those that are not committed yet included unless told otherwise."""
    if not (ROOT / ".git").exists():
        pytest.fail("the layout is checked on a git checkout; run the tests in one")
    new = ["--others", "--exclude-standard"] if and_new else []
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", *new],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return [name for name in done.stdout.decode().split("\0") if (ROOT / name).is_file()]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.name)
def test_every_requirement_is_a_range_that_holds_the_pinned_version(requirement: Requirement):
    assert requirement.specifier, "a requirement without a lowest version"
    assert not any(s.operator == "==" for s in requirement.specifier), "only constraints pin"
    assert constraints()[requirement.name.lower()] in requirement.specifier


def test_requirements_are_the_packages_that_are_imported():
    needed = {Requirement(text).name for text in PROJECT["dependencies"]}
    imported = set()
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            imported |= set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
    others = imported - set(FOLDERS) - set(sys.stdlib_module_names)
    distribution = {"cuda": "cuda-python", "nvmath": "nvmath-python"}
    extra = {Requirement(text).name for text in (*EXTRAS["cuda"], *EXTRAS["plot"])}
    assert {distribution.get(name, name) for name in others} <= needed | extra


def test_wheel_holds_the_packages_and_the_kernels_and_nothing_else(tmp_path: Path):
    source = tmp_path / "source"
    for name in tracked():
        if not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    # A fresh interpreter: setuptools changes what it is imported into.
    code = "from setuptools import build_meta as b; print(b.build_wheel('..'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {n for n in names if ".dist-info/" not in n}
    suffixes = (".py", ".cu", ".hpp", ".cpp")
    packages = tuple(f"{folder}/" for folder in FOLDERS)
    assert shipped == {n for n in tracked() if n.startswith(packages) and n.endswith(suffixes)}
    assert {"kernels/kernels.cu", "kernels/simt.hpp", "harness/report/text.py"} <= shipped
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert any(n.endswith("licenses/NOTICE") for n in names)


def test_top_level_names_are_the_agreed_ones():
    top = {name.split("/")[0] for name in tracked(and_new=False)}
    assert {name for name in top if not name.startswith(".")} <= AGREED


def test_no_source_file_is_longer_than_a_reader_bears():
    long = {}
    for name in tracked():
        if name.endswith((".py", ".cu", ".hpp", ".cpp")):
            lines = (ROOT / name).read_text(encoding="utf-8").count("\n")
            if lines > 700:
                long[name] = lines
    assert long == {}


def test_readme_exists_and_its_make_targets_too():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    wanted = set(re.findall(r"\bmake ([a-z]+)\b", " ".join(re.findall(r"^.*make .*$", text, re.M))))
    assert {"test", "demo"} <= targets
    code = "\n".join(re.findall(r"^(?:    |```).*?^(?:```|$)", text, re.MULTILINE | re.DOTALL))
    assert {w for w in wanted if f"make {w}" in code} <= targets


def test_readme_commands_of_the_harness_are_verbs():
    from harness.cli import VERBS

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    verbs = set(re.findall(r"python -m harness (\w+)", text))
    assert "compare" in verbs
    assert verbs <= set(VERBS)


def test_licence_and_credit():
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for credit in ("tiny-vllm", "Jędrzej Maczan", "Apache License", "Jaehun Ryu", "CC BY 4.0"):
        assert credit in notice


def test_changelog_knows_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in text or f"## [{PROJECT['version']}]" in text
