"""The page helm/README.md: its commands, as far as they go without a cluster."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from tests.helm.chart import CHART, ROOT, helm, run

pytestmark = pytest.mark.helm

PAGE = (ROOT / "helm" / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def words(start: str) -> list[str]:
    """Of the page's one command that starts so, with the chart's and the examples' real places."""
    [line] = [command for command in COMMANDS if command.startswith(start)]
    return [str(CHART) if word == "helm/disagg-router" else word for word in shlex.split(line)]


def in_place(given: list[str]) -> list[str]:
    return [str(ROOT / word) if word.startswith("examples/") else word for word in given]


def test_the_install_command_renders() -> None:
    """`helm install`, as far as a dry run on this side goes."""
    done = run(*in_place(words("helm install")[1:]), "--dry-run=client")
    assert done.returncode == 0, done.stderr
    assert 'image: "registry.example.com/disagg-router:0.1.0-cuda"' in done.stdout
    assert "helm -n default test llm --timeout 20m" in done.stdout


def test_the_port_forward_names_the_service() -> None:
    """The page's name and port are those of the release it installs."""
    done = run(*in_place(words("helm install")[1:]), "--dry-run=client", "--hide-notes")
    manifest = done.stdout.partition("MANIFEST:")[2]
    [public] = [d for d in yaml.safe_load_all(manifest) if d["kind"] == "Service" and not d["spec"].get("clusterIP")]
    _, _, service, ports = words("kubectl port-forward")
    assert service == f"service/{public['metadata']['name']}"
    assert ports.split(":")[1] == str(public["spec"]["ports"][0]["port"])


def test_a_mistake_is_answered_as_the_page_says() -> None:
    """The sentence under the command."""
    done = run(*in_place(words("helm template")[1:]))
    [sentence] = re.findall(r"```\n(config\..*)\n```", PAGE)
    assert done.returncode == 1
    assert sentence in done.stderr


def test_an_existing_secret_needs_no_other_value() -> None:
    """What the page's upgrade sets; the keys it creates are those that the chart reads."""
    rendered = run("template", "llm", str(CHART), *words("helm upgrade")[-2:])
    assert rendered.returncode == 0, rendered.stderr
    keys = set(re.findall(r"name: llm-tokens, key: (\w+)", rendered.stdout))
    created = {word.split("=")[1] for word in words("kubectl create") if word.startswith("--from-literal=")}
    assert created == keys - {"hf_token"}


def test_the_images_that_the_page_builds_are_in_the_recipe() -> None:
    """Targets and tags."""
    recipe = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for command in (shlex.split(line) for line in COMMANDS if line.startswith("docker build")):
        target, tag = command[command.index("--target") + 1], command[command.index("-t") + 1]
        assert f" AS {target}\n" in recipe
        assert tag.endswith(f"-{target}")


def test_every_link_leads_somewhere() -> None:
    """Of the page and of the chart's own."""
    for page in (ROOT / "helm" / "README.md", CHART / "README.md"):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), link


def test_the_helm_that_checks_is_the_one_that_the_page_names() -> None:
    """The version in `What was tested`."""
    assert f"helm {run('version', '--template', '{{.Version}}').stdout.strip().removeprefix('v')} " in PAGE
    assert helm()
