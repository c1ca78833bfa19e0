"""The `disagg-router` command."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Coroutine
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from disagg_router import __version__, command
from disagg_router.config import ClusterConfig, http_url, load_config, load_model_config
from disagg_router.controller.cluster import check_launchable, cluster_id, instance_specs
from disagg_router.controller.processes import die_with_parent
from disagg_router.controller.state import down as stop
from disagg_router.controller.state import state_folder
from disagg_router.cost.geometry import KVDtype, describe, from_config, from_numbers
from disagg_router.errors import ConfigError, LaunchError
from disagg_router.interfaces import JsonObject
from disagg_router.listening import bracketed
from disagg_router.observability.explain import read_decisions, summarise
from disagg_router.observability.explain_tables import tables
from disagg_router.proxy.admin_client import ADMIN_URL, fetch_status
from disagg_router.serve import OWNER_VARIABLE, ChildEnded, ServePlan
from disagg_router.serve import serve as run_serve
from disagg_router.sim.command import simulate_command
from disagg_router.wiring import (
    Addresses,
    bind,
    check_command,
    connector_of,
    down_on_ray,
    fleet_source,
    policy_of,
    run_controller_process,
    run_proxy,
)

app = typer.Typer(
    help=__doc__, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)

ClusterFile = Annotated[str, typer.Argument(metavar="CLUSTER.yaml", help="The cluster file.")]
Host = Annotated[str, typer.Option(help="Public listener.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Public listener.")]
AdminHost = Annotated[str, typer.Option(help="Admin listener; off loopback only with router.admin_token.")]
AdminPort = Annotated[int, typer.Option(min=1, max=65535, help="Admin listener.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def serve(
    cluster: ClusterFile,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    admin_host: AdminHost = "127.0.0.1",
    admin_port: AdminPort = 8001,
) -> None:
    """Launch the engines and the router on this host; Ctrl-C stops all of it."""
    config = _checked(cluster)
    _run(run_serve(serve_plan(config, cluster, Addresses(host, port, admin_host, admin_port))))


@app.command()
def controller(
    cluster: ClusterFile,
    host: Annotated[str, typer.Option(help="Where /fleet is served.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where /fleet is served.")] = 8100,
) -> None:
    """Launch the engines on Ray and keep them running; serve GET /fleet to routers."""
    config = _checked(cluster)
    run_controller_process(config, cluster_id(cluster), host, port)


@app.command()
def proxy(
    config_file: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="A cluster file with `fleet`.")],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    admin_host: AdminHost = "127.0.0.1",
    admin_port: AdminPort = 8001,
    controller_url: Annotated[
        str | None, typer.Option("--controller", metavar="URL", help="Instead of the file's `fleet`.")
    ] = None,
) -> None:
    """The router alone, in front of a controller's engines or of vLLM servers that run already."""
    config = load_config(config_file)
    if controller_url is None and config.fleet is None:
        raise ConfigError(f"{config_file}: fleet is missing: name a controller, a static list, a file or kubernetes")
    if controller_url is not None:
        try:
            controller_url = http_url(controller_url)
        except ValueError as exc:
            raise ConfigError(f"--controller {exc}") from exc
    public, admin = bind(config, Addresses(host, port, admin_host, admin_port))
    with public, admin:
        _run(run_proxy(config, controller_url, (public, admin)))


@app.command()
def status(
    admin: Annotated[str, typer.Option(metavar="URL", help="The router's admin listener.")] = ADMIN_URL,
    as_json: AsJson = False,
) -> None:
    """What a running router sees: instances and pairs; with --json leases, leans and the queue as well."""
    found = asyncio.run(fetch_status(admin))
    if as_json:
        command.print_json(found)
    else:
        _print_status(found)


@app.command()
def down(cluster: ClusterFile, as_json: AsJson = False) -> None:
    """Stop this host's controller of the cluster file and everything of its that is left; with RAY_ADDRESS set, on
    every other node of that Ray as well."""
    name = cluster_id(cluster)  # of the path alone: the file may have become wrong or be gone by now
    report = stop(name, state_folder(name))
    if not as_json:
        Console().print(report.sentence(), highlight=False)
    nodes = down_on_ray(name, state_folder(name)) if os.environ.get("RAY_ADDRESS") not in (None, "", "local") else ()
    if as_json:
        told = {"controller_pid": report.controller_pid, "killed": report.killed, "left": report.left}
        command.print_json(told | ({"nodes": [dataclasses.asdict(node) for node in nodes]} if nodes else {}))
    else:
        for node in nodes:
            Console().print(f"{node.address}: {node.report.sentence()}", highlight=False)
    if report.controller_pid is None and not report.killed and not nodes and not os.path.exists(cluster):
        sys.stderr.write(f"there is no file {cluster}: is it the path that was started?\n")
    if left := [*report.left, *(pid for node in nodes for pid in node.report.left)]:
        raise LaunchError(f"processes {left} could not be killed: see who owns them")


@app.command("check-config")
def check_config(cluster: ClusterFile, as_json: AsJson = False) -> None:
    """Read a cluster file and say whether it could be started."""
    config = load_config(cluster)
    pools = {role.value: pool.instances for role, pool in config.pools.items()}
    if config.pools or config.fleet is None:
        _checked(cluster)
    _check_parts(config, cluster)
    if as_json:
        command.print_json({"ok": True, "pools": pools, "policy": config.router.policy.name})
    else:
        shown = ", ".join(f"{count} {role}" for role, count in pools.items()) or "a fleet that runs already"
        Console().print(
            f"{cluster} is good: {shown}, policy {config.router.policy.name}", highlight=False, soft_wrap=True
        )


@app.command()
def kv(
    config: Annotated[str | None, typer.Option(metavar="config.json", help="A Hugging Face model config.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Instead of --config, with the next two.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(min=1)] = None,
    dtype: Annotated[KVDtype, typer.Option(help="Of the KV cache.")] = KVDtype.BF16,
    tokens: Annotated[int, typer.Option(min=0, help="How long a prompt.")] = 1,
    gbit_per_s: Annotated[float | None, typer.Option(help="Of the link, for the time it takes at least.")] = None,
    as_json: AsJson = False,
) -> None:
    """How many bytes of KV a prompt has, and how long a link takes to move them at least."""
    if config is not None and (layers, kv_heads, head_dim) == (None, None, None):
        geometry = from_config(load_model_config(config), dtype=dtype)
    elif config is None and layers is not None and kv_heads is not None and head_dim is not None:
        geometry = from_numbers(layers, kv_heads, head_dim, dtype)
    else:
        raise ConfigError("give either --config or all of --layers, --kv-heads and --head-dim")
    figures = describe(geometry, tokens, gbit_per_s)
    if as_json:
        command.print_json(figures)
        return
    console = Console()
    console.print(f"{figures['bytes_per_token']:,} bytes per token", highlight=False)
    console.print(f"{figures['bytes']:,} bytes for {tokens:,} tokens", highlight=False)
    if figures["transfer_floor_s"] is not None:
        console.print(f"{figures['transfer_floor_s']:.4g} s at least at {gbit_per_s:g} Gbit/s", highlight=False)


@app.command()
def explain(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A router's decision log.")], as_json: AsJson = False
) -> None:
    """Why a router chose what it chose, what it predicted, and what came of it."""
    summary = summarise(*read_decisions(file))
    if as_json:
        command.print_json(dataclasses.asdict(summary))
        return
    console = Console(markup=False)  # what stands in a file is shown as it is
    for part in tables(summary):
        console.print(part, highlight=False)


app.command("simulate")(simulate_command)


@app.command()
def version() -> None:
    """Print the version."""
    Console().print(__version__, highlight=False)


def main() -> None:
    """Exit codes: 0 good, 1 failed, 2 wrong use. Errors are one line on stderr that says what to do."""
    _die_with_owner()
    _log_to_stderr()
    with command.exit_codes():
        try:
            app(standalone_mode=False)
        except ChildEnded as exc:
            if exc.explained:
                sys.exit(exc.status)
            raise


def serve_plan(config: ClusterConfig, cluster: str, at: Addresses) -> ServePlan:
    own_admin_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(at.admin_host, at.admin_host)
    return ServePlan(
        cluster_file=cluster,
        cluster=cluster_id(cluster),
        public_url=f"http://{bracketed(at.host)}:{at.port}",
        admin_url=f"http://{bracketed(own_admin_host)}:{at.admin_port}",
        admin_token=config.router.admin_token,
        proxy_options=(
            *("--host", at.host, "--port", str(at.port)),
            *("--admin-host", at.admin_host, "--admin-port", str(at.admin_port)),
        ),
        instances=sum(pool.instances for pool in config.pools.values()),
        drain_s=config.limits.drain_s,
        stop_grace_s=config.engine.stop_grace_s,
        ready_limit_s=config.engine.start_limit_s + 60,  # the controller, which knows more, is to give up first
    )


def _checked(cluster: str) -> ClusterConfig:
    config = load_config(cluster)
    check_launchable(config)
    _check_parts(config, cluster)
    return config


def _check_parts(config: ClusterConfig, cluster: str) -> None:
    """What only the parts themselves know to be wrong. Raises ConfigError."""
    policy_of(config)
    connector = connector_of(config)
    if config.fleet is not None:
        fleet_source(config, None, connector)
    for spec in instance_specs(config, cluster_id(cluster)):
        check_command(spec, connector)


def _run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def _die_with_owner() -> None:
    owner = os.environ.pop(OWNER_VARIABLE, "")
    if owner.isdigit():
        die_with_parent(int(owner))


def _log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per health probe
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its "uvicorn.error" is where it says that all is well


def _print_status(found: JsonObject) -> None:
    console = Console()
    console.print("ready" if found["ready"] else "not ready", style="bold", highlight=False)
    columns = {"instances": ("id", "role", "state", "url"), "pairs": ("prefill", "decode", "state", "reason")}
    for title, names in columns.items():
        table = Table(*names, title=title, title_justify="left")
        for row in found[title]:
            table.add_row(*(str(row[name] or "") for name in names))
        console.print(table)
