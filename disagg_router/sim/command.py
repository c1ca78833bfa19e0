"""`disagg-router simulate`: one policy on one fleet under one workload, in virtual time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from disagg_router import command
from disagg_router.errors import ConfigError
from disagg_router.interfaces import PathPolicy
from disagg_router.model import Role, Slo
from disagg_router.policies.registry import build_policy
from disagg_router.sim.describe import describe
from disagg_router.sim.drive import Run, simulate
from disagg_router.sim.model import FleetPlan, Workload
from disagg_router.sim.oracle import Sampling, Tried, simulate_with_branches
from disagg_router.sim.oracle_bound import hindsight
from disagg_router.sim.picture import draw
from disagg_router.sim.profiles import Profile, load_profiles
from disagg_router.sim.regret import regret_figures, regret_rows
from disagg_router.sim.report import Timeline, figures
from disagg_router.sim.workloads import Cut, Lengths, Pace, load, synthetic
from disagg_router.sim.world import Setup

SWITCH = {"on": True, "off": False}


def simulate_command(  # noqa: PLR0913, PLR0917 - one option each
    profile: Annotated[str, typer.Option(help="A shipped one or a FILE; or prefill=A,decode=B[,unified=C].")],
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Requests that somebody had.")] = None,
    format_: Annotated[
        str, typer.Option("--format", help="mooncake, azure, burstgpt, bailian, servegen, sharegpt or lengths.")
    ] = "lengths",
    synthetic_: Annotated[
        str | None, typer.Option("--synthetic", metavar="IN:OUT", help="Made-up requests of this length.")
    ] = None,
    pools: Annotated[str, typer.Option(help="unified=8 or prefill=2,decode=1[,unified=1].")] = "unified=8",
    policy: Annotated[str, typer.Option(help="Any that a cluster file may name.")] = "break_even",
    rate: Annotated[float | None, typer.Option(help="Requests per second; as in the trace if left out.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="So many of the trace.")] = None,
    chunk_tokens: Annotated[str, typer.Option(help="--max-num-batched-tokens; off: whole prefills, first.")] = "2048",
    threshold: Annotated[int | None, typer.Option(help="Tokens; ignored by policies without one.")] = None,
    admission: Annotated[str, typer.Option(help="on or off.")] = "on",
    slo_ttft_ms: Annotated[float, typer.Option(min=0)] = 2000,
    slo_tpot_ms: Annotated[float, typer.Option(min=0)] = 100,
    slo_max_gap_ms: Annotated[float, typer.Option(min=0)] = 500,
    link_gbyte_per_s: Annotated[float, typer.Option(help="Of each instance, each direction; inf is ideal.")] = 12,
    prior_factor: Annotated[float, typer.Option(help="The policy's first guess of prefill times is off by it.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Of arrivals, noise and ties.")] = 1,
    regret: Annotated[bool, typer.Option("--regret", help="Try other decisions as well: much slower.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="The run over time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, progress on stderr.")] = False,
) -> None:
    """What a policy would have done with these requests on that hardware: the router's code on a simulated fleet."""
    plan = FleetPlan(parse_pools(pools), _chunk(chunk_tokens), _link(link_gbyte_per_s))
    setup = Setup(
        plan=plan,
        profiles=_profiles(profile, plan),
        slo=Slo(slo_ttft_ms / 1000, slo_tpot_ms / 1000, slo_max_gap_ms / 1000),
        admission=_switch("--admission", admission),
        prior_factor=prior_factor,
        seed=seed,
    )
    workload = _workload(trace, format_, synthetic_, rate, requests, seed)
    chosen = policy_named(policy, threshold)
    timeline = Timeline(workload.arrivals[-1].at_s if workload.arrivals else 0.0)
    run, tried, wall_s = _run(setup, workload, chosen, timeline, regret=regret)
    found = figures(run, setup) | {"wall_s": wall_s, "simulated_requests_per_s": len(run.outcomes) / wall_s}
    if regret:
        found["regret"] = regret_figures(tried, hindsight(setup, workload), seed)
    if picture is not None:
        draw(timeline, run.outcomes, setup, picture)
    console = Console(stderr=as_json)
    console.print(_table(found, workload, policy, pools), highlight=False)
    if as_json:
        command.print_json(found)


def parse_pools(text: str) -> Mapping[Role, int]:
    """`prefill=2,decode=1` -> instances of each role. Raises ConfigError."""
    found: dict[Role, int] = {}
    for part in text.split(","):
        name, _, count = part.partition("=")
        role, instances = name.strip(), count.strip()
        if role not in list(Role) or Role(role) in found or not instances.isdigit() or int(instances) < 1:
            raise ConfigError(f"--pools {text!r}: write prefill, decode, unified once at most, like prefill=2,decode=1")
        found[Role(role)] = int(instances)
    if not ({Role.DECODE, Role.UNIFIED} & found.keys()):
        raise ConfigError(f"--pools {text!r} has nobody to decode: add decode=N or unified=N")
    return found


def policy_named(name: str, threshold_tokens: int | None) -> PathPolicy:
    """Raises ConfigError. `threshold_tokens` is for the policy that has one."""
    with_tokens = name == "threshold" and threshold_tokens is not None
    return build_policy(name, {"tokens": threshold_tokens} if with_tokens else {})


def _run(
    setup: Setup, workload: Workload, policy: PathPolicy, timeline: Timeline, *, regret: bool
) -> tuple[Run, Sequence[Tried], float]:
    began_s = time.monotonic()
    # A thread that refreshes the bar would hold locks while the process forks.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bars:
        bar = bars.add_task("simulating", total=len(workload.arrivals))

        def progress(done: int) -> None:
            if done % (10 if regret else 100) == 0:
                bars.update(bar, completed=done, refresh=True)

        if regret:
            sampling = Sampling(seed=setup.seed)
            run, tried = simulate_with_branches(
                setup, workload, policy, sampling, watch=timeline.watch, progress=progress
            )
        else:
            run, tried = simulate(setup, workload, policy, watch=timeline.watch, progress=progress), ()
    return run, tried, time.monotonic() - began_s


def _workload(
    trace: Path | None, format_: str, made_up: str | None, rate: float | None, requests: int | None, seed: int
) -> Workload:
    rng = random.Random(seed)
    if (trace is None) == (made_up is None):
        raise ConfigError("give either --trace FILE or --synthetic IN:OUT")
    if trace is not None:
        return load(trace, format_, rng, cut=Cut(requests), pace=Pace(rate)).workload
    lengths = Lengths.parse(made_up or "")
    if rate is None or requests is None:
        raise ConfigError("--synthetic needs --rate and --requests")
    return synthetic(lengths, requests, rate, rng)


def _profiles(text: str, plan: FleetPlan) -> Mapping[Role, Profile]:
    found = load_profiles(text)
    for role in plan.pools:
        if role not in found:
            raise ConfigError(f"--profile {text!r} says nothing of the {role} pool: add {role}=NAME")
    return found


def _chunk(text: str) -> int | None:
    if text == "off":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--chunk-tokens {text!r} is neither a number of tokens nor off")
    return int(text)


def _link(gbyte_per_s: float) -> float:
    if not gbyte_per_s > 0:
        raise ConfigError(f"--link-gbyte-per-s {gbyte_per_s:g} moves nothing: give more than 0, or inf")
    return gbyte_per_s * 1e9


def _switch(option: str, text: str) -> bool:
    if text not in SWITCH:
        raise ConfigError(f"{option} {text!r} is neither on nor off")
    return SWITCH[text]


def _table(found: Mapping[str, Any], workload: Workload, policy: str, pools: str) -> Table:
    asked = describe(workload)
    title = (
        f"{policy} on {pools}: {asked.requests:,} requests, {found['offered_rps']:.2f}/s, "
        f"{asked.prompt_tokens.mean:,.0f} tokens in, {asked.output_tokens.mean:,.0f} out"
    )
    table = Table("", title=title, title_justify="left")
    for name in ("mean", "p50", "p99"):
        table.add_column(name, justify="right")
    for key, label in (("ttft_s", "TTFT, s"), ("tpot_s", "TPOT, s"), ("max_gap_s", "longest gap, s")):
        table.add_row(label, *(f"{found[key][name]:.4g}" for name in ("mean", "p50", "p99")))
    table.add_section()
    table.add_row("attainment", "", "", f"{found['attainment']:.1%}")
    table.add_row("goodput per GPU, 1/s", "", "", f"{found['goodput_rps_per_gpu']:.4g}")
    for name, count in {**found["requests"], **found["paths"]}.items():
        table.add_row(name.replace("_", " "), "", "", f"{count:,}")
    table.add_row("KV moved, GB", "", "", f"{found['kv_bytes_moved'] / 1e9:,.1f}")
    if "regret" in found:
        table.add_section()
        for label, figure in regret_rows(found["regret"]):
            table.add_row(label, "", "", figure)
        table.add_section()
    speed = found["simulated_requests_per_s"]
    table.add_row("simulated requests per second", "", "", f"{speed:,.0f}" if math.isfinite(speed) else "")
    return table
