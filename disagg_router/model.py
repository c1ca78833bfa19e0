"""The nouns: frozen, slotted dataclasses, enums and NewTypes; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, NewType

InstanceId = NewType("InstanceId", str)
# A JSON object as the router handles it: keys decoded, values left as msgspec.Raw until somebody needs them.
# Whoever changes one makes a new one.
Body = Mapping[str, Any]


class Role(StrEnum):
    """What an instance is meant for: a preference under a policy with soft roles, binding under the others."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class Path(StrEnum):
    """How a prompt's KV reaches the decode instance."""

    REMOTE_PREFILL = "remote_prefill"
    LOCAL = "local"
    RECOMPUTE = "recompute"


class Reason(StrEnum):
    """Why a decision took its path; a metric label, so a closed set."""

    POLICY = "policy"  # the policy knows one path only
    LONG_PROMPT = "long_prompt"
    SHORT_PROMPT = "short_prompt"  # a handoff costs more than computing so few tokens
    CACHE_HOT = "cache_hot"  # the target holds most of the prompt already
    PREFILL_BUSY = "prefill_busy"  # the queue in front of the other prefills is what makes them slower
    LINK_BUSY = "link_busy"  # the handoffs in flight are
    TRANSFER_SLOWER = "transfer_slower"  # moving the KV takes longer than computing it
    PREFILL_FASTER = "prefill_faster"  # the first token comes earlier with a prefill elsewhere
    DECODE_BUSY = "decode_busy"  # the decode target has prefills of its own to finish first
    PROTECTS_STREAMS = "protects_streams"  # the path not taken would break objectives of more streams
    SAMPLED = "sampled"  # the other path looked better; nothing is known of this one, and little is lost by trying
    NO_PREFILL = "no_prefill"  # no tested pair leads to the decode target
    NOT_COUNTED = "not_counted"  # the tokenizer failed, so nobody knows how long the prompt is
    NOT_SPLITTABLE = "not_splittable"  # the request's shape must stay whole on one instance
    FORCED = "forced"


class InstanceState(StrEnum):
    STARTING = "starting"  # launched, not yet answering
    READY = "ready"
    UNREACHABLE = "unreachable"  # was answering, does not now
    DRAINING = "draining"  # finishes what it has, takes nothing new
    FAILED = "failed"  # its process is gone; waits for its next start


class PairState(StrEnum):
    UNTESTED = "untested"
    TESTING = "testing"
    READY = "ready"
    FAILED = "failed"  # the self-test did not pass; it is tried again later
    REFUSED = "refused"  # the fingerprints do not fit; tried again only when one changes


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must agree before two engines may exchange KV. None = not known, which means local only.

    `model` is the string given to the engine: NIXL hashes the string, not the files.
    """

    model: str | None = None
    revision: str | None = None
    vllm_version: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    block_size: int | None = None
    attention_backend: str | None = None
    kv_layout: str | None = None
    connector: str | None = None  # name and direction, for example "nixl:pull"
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None


@dataclass(frozen=True, slots=True)
class Instance:
    """One vLLM server as the fleet source knows it. `url` is scheme://host:port without a trailing slash.

    `incarnation` changes with every start of the process behind the url.
    """

    id: InstanceId
    role: Role
    url: str
    state: InstanceState
    incarnation: str
    engine_id: str | None = None
    fingerprint: Fingerprint = Fingerprint()
    kv_events: str | None = None  # ZMQ endpoint that publishes, and
    kv_replay: str | None = None  # the one that says again what was missed
    dp_size: int = 1  # data-parallel ranks
    kv_capacity_tokens: int | None = None  # of all ranks; None where the engine does not say
    side_channel: str | None = None  # host:port of the connector's handshake

    @property
    def targets(self) -> tuple[Target, ...]:
        """One for each data-parallel rank."""
        return tuple(Target(self.id, rank) for rank in range(self.dp_size))

    @property
    def rank_capacity_tokens(self) -> int | None:
        """KV of one target; the ranks of one server are alike."""
        return None if self.kv_capacity_tokens is None else self.kv_capacity_tokens // self.dp_size


class Estimate(NamedTuple):
    """A predicted time and its standard deviation, in seconds."""

    mean_s: float
    sd_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Everything a fleet source knows at one moment; versions only grow."""

    version: int
    instances: tuple[Instance, ...]


class Target(NamedTuple):
    """(instance, data-parallel rank): what is chosen, reserved and indexed. A tuple, for it is hashed all the time."""

    instance: InstanceId
    dp_rank: int = 0


class Pair(NamedTuple):
    """An ordered (prefill, decode) couple; tested before it carries traffic."""

    prefill: InstanceId
    decode: InstanceId


@dataclass(frozen=True, slots=True)
class Slo:
    """Per-request service-level objectives, in seconds."""

    ttft_s: float
    tpot_s: float
    max_gap_s: float


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """What a policy may know of a request. Never its text.

    `prompt_tokens` is exact or None: the policy did not ask for it, the tokenizer failed, or there is no text to count
    (`countable` is False).
    `tiebreak` in [0, 1) stands in for a random source, `excluded` holds targets that already failed it.
    `output_tokens` is how many are expected, at most `max_output_tokens` (None: no limit was given). `waited_s` is how
    long ago it arrived: that much of its TTFT is spent.
    """

    id: str
    endpoint: str
    stream: bool
    splittable: bool
    slo: Slo
    prompt_tokens: int | None = None
    cached_tokens: Mapping[Target, int] = field(default_factory=dict)
    priority: int = 0
    forced_path: Path | None = None
    tiebreak: float = 0.0
    excluded: frozenset[Target] = frozenset()
    output_tokens: float = 128.0
    max_output_tokens: int | None = None
    waited_s: float = 0.0
    countable: bool = True

    def uncached_tokens(self, target: Target) -> int:
        """Prompt tokens `target` would have to compute; 0 when nobody counted them."""
        return max(0, (self.prompt_tokens or 0) - self.cached_tokens.get(target, 0))


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy returns. `terms` holds every number it looked at, units in the names.

    `ttft` is the predicted TTFT of the best way per path, what it has waited already included; for a policy that
    predicts nothing the router adds that of the path taken. `chance` is the predicted probability that the request
    meets all its objectives, `gain` that less the expected number of running streams that would lose theirs; None: not
    predicted.
    """

    path: Path
    decode: Target
    reason: Reason
    prefill: Target | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    ttft: Mapping[Path, Estimate] = field(default_factory=dict)
    chance: float | None = None
    gain: float | None = None

    @property
    def prefiller(self) -> Target:
        """The target that computes the prompt."""
        return self.prefill or self.decode


@dataclass(frozen=True, slots=True)
class Handoff:
    """One prompt's KV going from a prefill to a decode instance: made once, used once, under a lease.

    `params` are the connector's own (they go to the decode engine verbatim). `answered_s` is the clock when
    the prefill's answer arrived; None until then.
    """

    pair: Pair
    request_id: str
    prefill_incarnation: str
    decode_incarnation: str
    prefill_engine_id: str | None
    block_size: int | None
    params: Mapping[str, Any] = field(default_factory=dict)
    answered_s: float | None = None


class HandoffResult(StrEnum):
    """What became of a handoff; each has exactly one."""

    SENT = "sent"
    EXPIRED = "expired"  # older than half its lease, or from an incarnation that is gone: never sent
    ABANDONED = "abandoned"  # the request ended before the decode leg was sent


# --- launching ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance the cluster file asks for; no ports yet, they belong to the node it lands on.

    `args` are vLLM arguments without the leading dashes (a value of True is a bare flag, None and False are left
    out), the pool's laid over the engine's. `cpus` is how many cores of its node an instance on CPU gets to
    itself; None leaves the affinity alone.
    """

    id: InstanceId
    cluster: str
    role: Role
    index: int  # over all pools, so that round robin over cores spreads the roles
    model: str
    served_name: str
    revision: str | None
    device: str  # "cpu" | "cuda"
    python: str
    args: Mapping[str, Any]
    env: Mapping[str, str]
    gpus: int
    cpus: tuple[int, ...] | str | None  # explicit cores, "auto", or None
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where one incarnation listens: a host its peers can reach, and its ports."""

    host: str
    http_port: int
    side_channel_port: int
    kv_events_port: int
    kv_replay_port: int


@dataclass(frozen=True, slots=True)
class Launch:
    """What a connector adds to an engine's command line and environment."""

    kv_transfer_config: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    python_path: tuple[str, ...] = ()  # folders that must be importable inside the engine


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """argv and the environment entries to lay over the node's own."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
