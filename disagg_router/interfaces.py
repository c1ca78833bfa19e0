"""The seams. Everything that meets another room of the project does so through one of these."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from disagg_router.errors import ErrorCode, RequestError
from disagg_router.model import (
    Body,
    Decision,
    EngineAddress,
    EngineCommand,
    Fingerprint,
    FleetSnapshot,
    Handoff,
    HandoffResult,
    InferenceRequest,
    Instance,
    InstanceId,
    InstanceSpec,
    Launch,
    Pair,
    Target,
)
from disagg_router.timing import CostSnapshot
from disagg_router.view import ClusterView, Leans

JsonObject = dict[str, Any]


class Clock(Protocol):
    """Time is injected everywhere. Monotonic seconds."""

    def now_s(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class PathPolicy(Protocol):
    """Sync and pure: same inputs, same Decision."""

    @property
    def needs_token_count(self) -> bool:
        """False spares the request a trip to the tokenizer."""
        ...

    @property
    def soft_roles(self) -> bool:
        """True: any instance may prefill and decode where the connector allows it. False: roles are binding."""
        ...

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        """Choose a path and its targets.

        Raises NoDecodeInstance when no target may decode, NoPrefillInstance when a forced path has no pair.
        """
        ...


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request holds while it is served: a prefill place on the target that computes its prompt, KV there and
    bytes on the link until the decode leg's first byte, KV on the decode target to the end."""

    decode_kv_bytes: float
    prefill_kv_bytes: float = 0.0  # 0 when nothing is handed off
    link_bytes: float = 0.0
    prefill_tokens: int = 0  # uncached ones, on the target that computes them
    prefill_attention: float = 0.0  # timing.attention of them
    prefill_s: float = 0.0  # predicted, without what is queued before it, and
    prefill_sd_s: float = 0.0  # its standard deviation


@dataclass(frozen=True, slots=True)
class Reserved:
    claim: Claim


@dataclass(frozen=True, slots=True)
class Wait:
    """No room now; `code` says of what, `ready_s` when it is predicted to free."""

    code: ErrorCode
    ready_s: float


@dataclass(frozen=True, slots=True)
class Reject:
    """Waiting would not help in time. `retry_s`: when it is predicted to be worth another try."""

    code: ErrorCode
    retry_s: float


Admission = Reserved | Wait | Reject


class AdmissionPolicy(Protocol):
    """Sync and pure, like a path policy."""

    def check(self, request: InferenceRequest, decision: Decision, view: ClusterView) -> Admission: ...


class RoleBalancer(Protocol):
    """On a timer. Moves the leans; hysteresis lives here, not in decide."""

    def step(self, view: ClusterView, leans: Leans) -> Leans: ...


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """One or more prefills that a target computed in one go: sums over them."""

    uncached_tokens: int
    attention: float  # sum of timing.attention
    steps: int = 1
    running: float = 0.0  # streams that ran beside it, on average, and
    context_tokens: float = 0.0  # the sum of their contexts


class CostModel(Protocol):
    """Learns the fleet's timing from what is served. Cheap: called for every request. Times on one clock."""

    def snapshot(self, now_s: float) -> CostSnapshot:
        """The same object until something was learned or its age has changed what it believes."""
        ...

    def prefilled(self, target: Target, work: PrefillWork, seconds: float, now_s: float) -> None: ...

    def stepped(self, target: Target, running: float, context_tokens: float, seconds: float, now_s: float) -> None:
        """The mean time of decode steps without prompt tokens, over a short while."""
        ...

    def handed_off(self, pair: Pair, moved_bytes: float, seconds: float, now_s: float) -> None:
        """From the decode leg's sending to its first byte, less the step that made the first token."""
        ...

    def transferred(self, decode: InstanceId, moved_bytes: float, seconds: float, now_s: float) -> None:
        """By the decode engine's own counters: bytes pulled since the last look, and the time the pulls took."""
        ...

    def forget(self, target: Target) -> None:
        """It is gone, or is another process now."""
        ...


class OutputPredictor(Protocol):
    """How long an answer will be, per max_tokens given."""

    def expect(self, max_output_tokens: int | None) -> float: ...

    def observe(self, max_output_tokens: int | None, output_tokens: int) -> None: ...


class KVConnector(Protocol):
    """How KV moves. Returns new bodies, never edits in place."""

    name: ClassVar[str]
    direction: ClassVar[str]  # "pull" | "push"; part of the fingerprint
    concurrent_legs: ClassVar[bool]  # the decode leg is sent before the prefill has answered
    soft_roles: ClassVar[bool]  # any engine may prefill for any other
    can_skip_load: ClassVar[bool]
    lease_s: float  # how long the prefill engine keeps a handoff's blocks

    def launch(self, spec: InstanceSpec, address: EngineAddress) -> Launch: ...

    def begin(self, request_id: str, prefill: Instance, decode: Instance) -> Handoff: ...

    def prefill_body(self, body: Body, handoff: Handoff) -> Body: ...

    def complete(self, handoff: Handoff, answer: Body, now_s: float) -> Handoff:
        """The handoff with the prefill answer's parameters in it.

        Raises UpstreamError when the answer cannot be the one that was asked for: no blocks, a wrong block count,
        another engine's id.
        """
        ...

    def decode_body(self, body: Body, handoff: Handoff) -> Body: ...

    def local_body(self, body: Body, *, load_external: bool) -> Body: ...

    def release_body(self, model: Any, handoff: Handoff) -> Body | None:  # noqa: ANN401 - a body's field as it is
        """A completions request that makes the prefill engine free the blocks at once; None where only the lease does.

        Of the client's request it holds the model's name only: another field might be what an engine refused.
        """
        ...


class FleetSource(Protocol):
    """Where the router's fleet comes from. Yields whole snapshots, at once and then on every change."""

    def watch(self) -> AsyncGenerator[FleetSnapshot, None]: ...


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One HTTP POST to an engine. Header names are lower case.

    `once`: it carries a handoff, so it is never sent a second time, not even when a reused connection turns out
    to be dead. `head_limit_s` bounds the wait for the answer's head; None takes the client's first-byte limit.
    `on_sent` is called just before the first byte is written: until then the engine knows nothing.
    """

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    once: bool = False
    head_limit_s: float | None = None
    on_sent: Callable[[], None] = lambda: None


class EngineResponse(Protocol):
    """An engine's answer whose status is known and whose body is still coming."""

    status: int
    headers: Mapping[str, str]  # lower-case names

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes as they arrive, transfer coding removed.

        Raises UpstreamTimeout when a gap exceeds the idle limit and UpstreamError when the engine goes away
        before the end.
        """
        ...

    async def read(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine says of itself. `model_cards` are the entries of its /v1/models, as they are; `kv_events` and
    `kv_replay` the ZMQ endpoints of its rank 0, where it publishes; `kv_capacity_tokens` is of all its ranks."""

    fingerprint: Fingerprint
    served_models: tuple[str, ...]
    model_cards: tuple[JsonObject, ...]
    incarnation: str | None  # changes when the process is another one; None where it cannot be told
    dp_size: int = 1
    kv_events: str | None = None
    kv_replay: str | None = None
    kv_capacity_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine's metrics say of its load, summed over its ranks. The `pulled_*` are totals since its start."""

    running: int
    waiting: int
    kv_usage: float  # 0 to 1, handoffs that still wait to be pulled included
    kv_capacity_tokens: int | None
    pulled_bytes: float = 0.0
    pull_s: float = 0.0


class EngineClient(Protocol):
    """The only way to a vLLM server. Raises UpstreamError and its kinds, never anything of its HTTP library."""

    def open(self, url: str, call: EngineCall) -> AbstractAsyncContextManager[EngineResponse]:
        """Send a request; entered once the answer's status is known. Leaving the context early aborts the request.

        For an event stream entered once its first event is there, since vLLM sends 200 before it has computed
        anything: an error event in that place is raised as UpstreamError. 5xx is UpstreamError too, 4xx is
        UpstreamRefused, no connection is UpstreamUnreachable.
        """
        ...

    async def tokenize(self, url: str, body: Body) -> Sequence[int]:
        """The token ids the engine makes of this completion or chat body."""
        ...

    async def healthy(self, url: str) -> bool:
        """GET /health is 200. False when the engine refuses or is gone; raises UpstreamTimeout when it is silent."""
        ...

    async def report(self, url: str) -> EngineReport: ...

    async def counters(self, url: str) -> Mapping[str, float]:
        """The engine's metrics, `name` or `name{label="value"}` -> value, summed over its engines."""
        ...

    async def load(self, url: str) -> EngineLoad:
        """A few of them, cheaply: it is asked of every engine all the time."""
        ...


class FollowEvents(Protocol):
    """Feeds the prefix index with the instance's KV events until it is cancelled."""

    async def __call__(self, instance: Instance) -> None: ...


class PairTest(Protocol):
    """Moves a prompt's KV from one instance to the other and checks the answer.

    Raises DisaggError with the reason when the pair must not carry traffic.
    """

    async def __call__(self, prefill: Instance, decode: Instance) -> None: ...


class RouteRecord(Protocol):
    """Told what happens to one request, by the router that serves it."""

    def decided(self, decision: Decision, request: InferenceRequest) -> None:
        """Every time; the last one counts. `request` as it was when it was decided on, its tokens counted."""
        ...

    def queued(self, wait_s: float) -> None: ...

    def rejected(self, rejection: Reject) -> None:
        """By admission, at once; the error that the client gets names the code."""
        ...


class RouteObserver(Protocol):
    """Told what happens to requests; counts and logs. Must be cheap and must not raise."""

    def decided(self, request: InferenceRequest, decision: Decision) -> None: ...

    def leg_failed(self, target: Target, error: RequestError) -> None: ...

    def handoff(self, result: HandoffResult) -> None: ...


# --- the controller's seams ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observed:
    """What the launcher sees of one incarnation. `exit_note` says why it ended, in one line."""

    id: InstanceId
    incarnation: str
    running: bool
    address: EngineAddress | None
    exit_note: str | None = None


@dataclass(frozen=True, slots=True)
class Start:
    spec: InstanceSpec
    incarnation: str


@dataclass(frozen=True, slots=True)
class Stop:
    id: InstanceId
    incarnation: str


Action = Start | Stop


class Launcher(Protocol):
    """Puts instances on nodes. Knows nothing of what they serve."""

    async def observe(self) -> Iterable[Observed]: ...

    async def apply(self, action: Action) -> None: ...


class CommandBuilder(Protocol):
    """Pure: the command line of one incarnation."""

    def __call__(self, spec: InstanceSpec, address: EngineAddress, incarnation: str) -> EngineCommand: ...
