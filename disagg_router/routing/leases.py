"""What requests hold: a lease per leg, released exactly once at its own time, and what an engine's metrics add."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Self

from disagg_router.interfaces import Claim, CostModel, EngineLoad, PrefillWork
from disagg_router.model import InstanceId, Target
from disagg_router.routing.prefill_queue import Batch, Beside, Place
from disagg_router.routing.streams import StreamBook
from disagg_router.routing.target_leases import Held, Link, TargetLeases


class LeaseKind(StrEnum):
    PREFILL = "prefill"  # a place in the queue of prefills, until the prefill answers
    HANDOFF = "handoff"  # prefill-side KV and link bytes, until the decode leg's first byte
    DECODE = "decode"  # decode KV, until the end


class Lease:
    """Held by whoever entered it; releasing twice is harmless and counts once."""

    __slots__ = ("_book", "_claim", "_held", "_leases")

    def __init__(self, book: LeaseBook, target: Target, claim: Claim) -> None:
        self._book, self._claim, self._held = book, claim, True
        self._leases = book.changing(target)  # stays the target's while this is held

    def release(self) -> None:
        if self._held:
            self._held = False
            self._let_go()
            self._book.changed(self._leases)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def _let_go(self) -> None:
        raise NotImplementedError


class PrefillLease(Lease):
    __slots__ = ("_done", "_place")

    def __init__(self, book: LeaseBook, target: Target, claim: Claim, *, observed: bool) -> None:
        super().__init__(book, target, claim)
        self._place, self._done = Place(claim, observed=observed), False
        self._leases.prefills_taken += 1
        self._leases.prefills.add(self._place, book.now_s(), book.beside(target))

    def done(self) -> None:
        """Release it, since its answer is there: that tells how long prefills take here."""
        self._done = True
        self.release()

    def _let_go(self) -> None:
        book, leases = self._book, self._leases
        leases.prefills.remove(self._place, book.now_s(), book.beside(leases.target), done=self._done)


class HandoffLease(Lease):
    """Its prefill-side KV is held from the start, its link bytes only once the prefill has answered."""

    __slots__ = ("_answered", "_sink")

    def __init__(self, book: LeaseBook, source: Target, sink: Target, claim: Claim) -> None:
        super().__init__(book, source, claim)
        self._leases.pinned.add(claim.prefill_kv_bytes)
        self._sink, self._answered = book.changing(sink), False
        self._sink.coming += 1
        self._sink.awaited += 1

    def answered(self) -> None:
        """The prefill is done: the KV may be pulled from now on."""
        if not self._held or self._answered:
            return
        self._answered = True
        self._leases.answered += 1
        self._sink.awaited -= 1
        self._leases.link.outward.add(self._claim.link_bytes)
        self._sink.link.inward.add(self._claim.link_bytes)
        self._book.touch(self._leases.link, self._sink.link)

    def _let_go(self) -> None:
        source, sink = self._leases, self._sink
        source.pinned.take(self._claim.prefill_kv_bytes)
        sink.coming -= 1
        if self._answered:
            source.answered -= 1
            source.link.outward.take(self._claim.link_bytes)
            sink.link.inward.take(self._claim.link_bytes)
            self._book.touch(source.link, sink.link)
        else:
            sink.awaited -= 1
        self._book.changed(sink)


class DecodeLease(Lease):
    __slots__ = ("_unseen",)

    def __init__(self, book: LeaseBook, target: Target, claim: Claim, *, streamed: bool) -> None:
        super().__init__(book, target, claim)
        self._unseen = not streamed
        self._leases.decodes.add(claim.decode_kv_bytes)
        self._leases.unseen += self._unseen

    def _let_go(self) -> None:
        self._leases.decodes.take(self._claim.decode_kv_bytes)
        self._leases.unseen -= self._unseen


class LeaseBook:
    """This router's leases. `touched` collects the targets whose load is another one now."""

    def __init__(
        self, *, costs: CostModel, streams: StreamBook, touched: set[Target], now_s: Callable[[], float]
    ) -> None:
        self._costs, self._streams, self._touched, self.now_s = costs, streams, touched, now_s
        self._targets: dict[Target, TargetLeases] = {}
        self._links: dict[InstanceId, Link] = {}

    def prefill(self, target: Target, claim: Claim, *, observed: bool) -> PrefillLease:
        """`observed` is False for an unstreamed answer computed whole: nobody sees when its prefill ends."""
        return PrefillLease(self, target, claim, observed=observed)

    def handoff(self, prefill: Target, decode: Target, claim: Claim) -> HandoffLease:
        return HandoffLease(self, prefill, decode, claim)

    def decode(self, target: Target, claim: Claim, *, streamed: bool) -> DecodeLease:
        return DecodeLease(self, target, claim, streamed=streamed)

    def of(self, target: Target) -> TargetLeases | None:
        """None where nothing was held and nothing is known. Prefills that should be over by now are left out."""
        leases = self._targets.get(target)
        if leases is not None:
            leases.prefills.expire(self.now_s())
        return leases

    def held(self) -> dict[tuple[LeaseKind, Target], Held]:
        found = {}
        for target, leases in self._targets.items():
            leases.prefills.expire(self.now_s())
            found[LeaseKind.PREFILL, target] = Held(len(leases.prefills), 0.0)
            found[LeaseKind.HANDOFF, target] = Held(leases.pinned.count, leases.pinned.total)
            found[LeaseKind.DECODE, target] = Held(leases.decodes.count, leases.decodes.total)
        return {key: held for key, held in found.items() if held.count}

    def settle(self) -> None:
        """On a timer: report what was observed, drop what nobody will ever see the end of."""
        now_s = self.now_s()
        for target, leases in self._targets.items():
            if leases.prefills.settle(now_s):
                self._touched.add(target)

    def sized(self, target: Target, capacity_tokens: int) -> None:
        """Nothing is known of the engine yet but its capacity."""
        leases = self.changing(target)
        if leases.kv_capacity_bytes == math.inf:
            leases.gone = False
            leases.kv_capacity_bytes = capacity_tokens * self._costs.snapshot(self.now_s()).kv_bytes_per_token

    def reconcile(self, target: Target, engine: EngineLoad) -> None:
        """Take over what the engine says: its capacity, and what is on it beyond our leases.

        Its figures and ours are never of the same moment, so of two looks the one that shows less counts. What our
        requests use is taken from their streams; one without a stream may use all that was reserved for it.
        """
        leases = self.changing(target)
        leases.gone = False
        kv_bytes_per_token = self._costs.snapshot(self.now_s()).kv_bytes_per_token
        capacity_bytes = (engine.kv_capacity_tokens or 0) * kv_bytes_per_token
        leases.kv_capacity_bytes = capacity_bytes or math.inf
        streams = self._streams.beside(target)
        here = leases.decodes.count - leases.awaited
        silent = max(0.0, here - streams.running) / max(1, leases.decodes.count)
        own_bytes = streams.context_tokens * kv_bytes_per_token + silent * leases.decodes.total + leases.pinned.total
        own = here + leases.pinned.count - leases.answered
        seen = (
            max(0, engine.running + engine.waiting - own),
            max(0.0, min(1.0, engine.kv_usage) * capacity_bytes - own_bytes),
        )
        before, leases.seen = leases.seen or seen, seen
        leases.foreign, leases.foreign_bytes = min(before[0], seen[0]), min(before[1], seen[1])
        leases.foreign_tokens = leases.foreign_bytes / kv_bytes_per_token if leases.foreign and capacity_bytes else 0.0

    def forget(self, target: Target) -> None:
        """The engine is gone, or is another process now. Leases end with their requests."""
        if leases := self._targets.get(target):
            leases.clear()
            leases.prefills.doubt()
            leases.gone = True
            self.changed(leases)

    def beside(self, target: Target) -> Beside:
        """The streams that run there, those of others included."""
        ours = self._streams.beside(target)
        leases = self._targets.get(target)
        if leases is None or not leases.foreign:
            return ours
        return Beside(ours.running + leases.foreign, ours.context_tokens + leases.foreign_tokens)

    # --- for the leases ---

    def changing(self, target: Target) -> TargetLeases:
        """The target's leases, about to be changed."""
        self._touched.add(target)
        leases = self._targets.get(target)
        if leases is None:
            link = self._links.setdefault(target.instance, Link())
            link.targets.append(target)
            leases = self._targets[target] = TargetLeases(target, link, lambda batch: self._observed(target, batch))
        return leases

    def touch(self, *links: Link) -> None:
        for link in links:
            self._touched.update(link.targets)

    def changed(self, leases: TargetLeases) -> None:
        """A target that is gone leaves nothing behind once nothing is held there."""
        target = leases.target
        self._touched.add(target)
        if leases.gone and leases.idle and self._targets.get(target) is leases:
            del self._targets[target]
            leases.link.targets.remove(target)
            if not leases.link.targets:
                del self._links[target.instance]

    def _observed(self, target: Target, batch: Batch) -> None:
        now_s = self.now_s()
        running, context_tokens = batch.mean
        steps = self._costs.snapshot(now_s).of(target).steps(batch.tokens, running)
        work = PrefillWork(batch.tokens, batch.attention, steps, running, context_tokens)
        self._costs.prefilled(target, work, batch.seconds, now_s)
