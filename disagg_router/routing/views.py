"""The picture that a policy decides on, put together anew for every decision out of parts that seldom change."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from disagg_router.interfaces import CostModel
from disagg_router.model import InstanceId, Role, Target
from disagg_router.routing.fleet import Fleet, partners_of
from disagg_router.routing.loads import Loads
from disagg_router.view import ClusterView, Leans, TargetLoad, TargetView


class Views:
    """`fleet` reads the brain's published picture. A target's view is made again only when its load is another."""

    def __init__(self, fleet: Callable[[], Fleet], loads: Loads, costs: CostModel) -> None:
        self._fleet, self._loads, self._costs = fleet, loads, costs
        self._seen: Fleet | None = None
        self._targets: tuple[Target, ...] = ()
        self._roles: tuple[Role, ...] = ()
        self._loaded: tuple[TargetLoad, ...] = ()
        self._views: tuple[TargetView, ...] = ()
        self._partners: Mapping[InstanceId, tuple[int, ...]] = {}
        self.leans = Leans()

    def now(self, now_s: float) -> ClusterView:
        fleet = self._fleet()
        if fleet is not self._seen:
            self._adopt(fleet)
        loaded = self._loads.all(self._targets)
        if loaded is not self._loaded:
            self._loaded = loaded
            self._views = tuple(map(self._view, self._views, self._targets, self._roles, loaded))
        return ClusterView(
            now_s=now_s,
            targets=self._views,
            partners=self._partners,
            costs=self._costs.snapshot(now_s),
            soft_roles=fleet.soft_roles,
            leans=self.leans,
            kv_bytes_per_s=self._loads.demand.kv_bytes_per_s(now_s),
        )

    @staticmethod
    def _view(seen: TargetView, target: Target, role: Role, load: TargetLoad) -> TargetView:
        return seen if seen.load is load and seen.target is target else TargetView(target, role, load)

    def _adopt(self, fleet: Fleet) -> None:
        self._seen = fleet
        found = [(target, instance.role) for instance in fleet.ready() for target in instance.targets]
        if found != list(zip(self._targets, self._roles, strict=True)):
            self._targets = tuple(target for target, _ in found)
            self._roles = tuple(role for _, role in found)
            self._views = tuple(TargetView(target, role) for target, role in found)
            self._loaded = ()
        for instance in fleet.ready():
            for target in instance.targets:
                self._loads.sized(target, instance.rank_capacity_tokens)
        self._partners = partners_of(fleet.tested_pairs(), self._targets)
