"""One number decides: prefill remotely when the decode target would have to compute at least T tokens itself."""

from __future__ import annotations

from pydantic import ConfigDict, NonNegativeInt, validate_call

from disagg_router.model import Decision, InferenceRequest, Reason
from disagg_router.policies.candidates import local, pick_decode, remote
from disagg_router.view import ClusterView


class Threshold:
    """`tokens` T: remote iff the uncached tokens on the chosen decode target are >= T. 0 always, None never.

    Counted in tokens, never rounded to blocks.
    """

    needs_token_count = True
    soft_roles = False

    @validate_call(config=ConfigDict(strict=True))
    def __init__(self, tokens: NonNegativeInt | None = 256) -> None:
        self._tokens = tokens

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        if not request.splittable:
            return local(request, view, Reason.NOT_SPLITTABLE)
        decode = pick_decode(request, view)
        if request.prompt_tokens is None and self._tokens:
            return local(request, view, Reason.NOT_COUNTED)
        uncached_tokens = request.uncached_tokens(decode.target)
        terms = {"uncached_tokens": float(uncached_tokens)}
        if self._tokens is None or uncached_tokens < self._tokens:
            return local(request, view, Reason.SHORT_PROMPT, terms)
        terms["threshold_tokens"] = float(self._tokens)
        return remote(request, view, Reason.LONG_PROMPT, terms, decode)
